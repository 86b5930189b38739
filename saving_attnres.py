# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a model takes along when it is saved or pushed, and what an adapter has to fit when it is loaded."""

from .depth_queries import AttnResDepthQueries


# What a checkpoint that carries its code (`register_for_auto_class`) tells the Auto classes
REMOTE_CODE_AUTO_MAP = {
    "AutoConfig": "configuration_attnres.AttnResConfig",
    "AutoModel": "modeling_attnres.AttnResModel",
    "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_attnres.AttnResForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_attnres.AttnResForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_attnres.AttnResForTokenClassification",
}


class AttnResSavingMixin:
    """Saving and pushing with the code of the model, and adapters that are checked as they are loaded."""

    def save_pretrained(self, *args, **kwargs):
        """As in transformers. A model from a folder that carries its code is saved with the code.

        Raises:
            ValueError: for a stage of `DistributedConfig(pp_size=...)`, which has a part of the weights.
        """
        if hasattr(self, "_pp_stage"):
            raise ValueError(
                "A stage of `pp_size` processes has a part of the layers, and the files would hold no others. Load the"
                " model without `pp_size` to save it."
            )
        # A merged adapter leaves a buffer with its block size, which the config of a model states already
        self._keys_to_ignore_on_save |= {
            name for name, _ in self.named_buffers() if name.endswith("depth_queries.trained_block_size")
        }
        if not self.is_remote_code() and not getattr(self.config, "auto_map", None):
            return super().save_pretrained(*args, **kwargs)
        auto_classes = {reference.split(".")[-1]: name for name, reference in REMOTE_CODE_AUTO_MAP.items()}
        # transformers would list the class that is saved and no other
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        model_class = type(self)
        own = vars(model_class).get("_auto_class")
        model_class._auto_class = auto_classes.get(model_class.__name__, self._auto_class)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if own is None:  # so that it has again what the public class has
                del model_class._auto_class
            else:
                model_class._auto_class = own

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """As in transformers. The code goes along, so that the model loads where `attnres` is not installed."""
        model_class = type(self)
        if model_class.is_remote_code():
            return super().push_to_hub(repo_id, **kwargs)
        try:
            from attnres.model_cards import push_card_if_missing
        except ImportError:  # this code has come with a checkpoint, and the package is not installed
            pass
        else:
            push_card_if_missing(self, repo_id, private=kwargs.get("private"), token=kwargs.get("token"))
        auto_map = self.config.auto_map
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        try:
            return super().push_to_hub(repo_id, **kwargs)
        finally:
            self.config.auto_map = auto_map or {}

    def load_adapter(self, *args, **kwargs):
        before = set(getattr(self, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        try:  # here, as transformers sets tensors by itself
            for module in self.modules():
                if isinstance(module, AttnResDepthQueries):
                    module.check_trained_for(getattr(module, "trained_block_size", None))
        except ValueError:
            self.delete_adapter(list(set(self.peft_config) - before))
            raise
        return loading_info
