# SPDX-License-Identifier: Apache-2.0
"""What holds for every decoder of transformers: `python tests/tools/family_survey.py RESULTS.json [model types]`.

`families_page.py` makes `base/families.json`, which `attnres families` shows, and `docs/families.md` of the results.

Each type is measured on a tiny model with random weights, in fp64 (also what the base computes in fp32), and written
to the results at once: a run that was stopped goes on where it was.
"""

import contextlib
import copy
import filecmp
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from unittest import mock


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from decoder_configs import DECODERS, NOT_DECODERS, decoder_config
from literal_definition import literal_logits, relative
from rounding import all_in_fp64
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnres import AttnResConfig, AttnResForCausalLM, BlockCache
from attnres.conversion import convert, revert
from attnres.data.packing import sees_other_documents
from attnres.training.config import cannot_pack


BLOCK_SIZES = (1, 2, 3)


def native_model(config, seed: int = 0):
    """The base with random weights; those of norms too, as ones and zeros would hide their misuse."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    if getattr(config, "num_experts_per_tok", None) is not None:
        with contextlib.suppress(Exception):  # products in groups are not there in fp64
            model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    return model


def converted(native, block_size: int, **fields):
    config = AttnResConfig.from_base_config(
        native.config, block_size=block_size, attn_res_scale_norm_eps=True, **fields
    )
    model = AttnResForCausalLM(config).to(native.dtype).eval()
    missing, unexpected = model.load_state_dict(native.state_dict(), strict=False)
    missing = [name for name in missing if "depth_queries" not in name]
    assert not missing and not unexpected, f"missing {missing[:3]}, unexpected {unexpected[:3]}"
    if getattr(config, "num_experts_per_tok", None) is not None:
        with contextlib.suppress(Exception):
            model.set_experts_implementation("eager")
    return model


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


class Survey:
    """The measurements of one type. Each is a method `measure_...`, which returns what is written down."""

    def __init__(self, model_type: str):
        self.config = decoder_config(model_type)
        self.native = native_model(self.config)
        self.input_ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
        self.models = {}
        with torch.no_grad():
            self.logits = self.native(self.input_ids, use_cache=False).logits
        assert self.logits.isfinite().all(), "the native model itself has no finite logits"

    def model(self, block_size: int, random: bool = True):
        if block_size not in self.models:
            self.models[block_size] = converted(self.native, block_size)
        model = self.models[block_size]
        torch.manual_seed(2)
        queries = model.base_model.depth_queries
        with torch.no_grad():
            queries.query.zero_(), queries.key_norm.fill_(1.0)
            if random:
                queries.query.normal_(std=0.3), queries.key_norm.add_(torch.randn_like(queries.key_norm) * 0.3)
        return model

    def measure_sublayers(self):
        return self.model(1).config.sublayers_per_layer()

    def measure_zero_queries(self):
        errors = []
        for block_size in BLOCK_SIZES:
            model = self.model(block_size, random=False)
            errors.append(relative(model(self.input_ids, use_cache=False).logits, self.logits))
            with torch.no_grad():
                errors.append(relative(model(self.input_ids, use_cache=False).logits, self.logits))
        return max(errors)

    def measure_random_queries(self):
        errors = []
        for block_size in BLOCK_SIZES:
            model = self.model(block_size)
            expected, _ = literal_logits(self.native, model, self.input_ids)
            with torch.no_grad():
                errors.append(relative(model(self.input_ids, use_cache=False).logits, expected))
        return max(errors)

    def measure_moved(self):
        """How much the queries change: if nothing, equality shows nothing."""
        with torch.no_grad():
            return relative(self.model(2)(self.input_ids, use_cache=False).logits, self.logits)

    def measure_training_mode(self):
        errors = []
        for block_size in BLOCK_SIZES:
            model = without_dropout(self.model(block_size))
            with torch.no_grad():
                expected = model(self.input_ids, use_cache=False).logits
            errors.append(relative(model(self.input_ids, use_cache=False).logits, expected))
        # What layers do in training only, such as noise in a router, is the base's
        native, model = without_dropout(self.native).train(), self.model(2, random=False).train()
        try:
            torch.manual_seed(3)
            expected = native(self.input_ids, use_cache=False).logits
            torch.manual_seed(3)
            errors.append(relative(model(self.input_ids, use_cache=False).logits, expected))
        finally:
            native.eval(), model.eval()
        return max(errors)

    def measure_depth_attentions(self):
        model, errors = self.model(3), []
        _, expected = literal_logits(self.native, model, self.input_ids)
        with torch.no_grad():
            weights = model(self.input_ids, use_cache=False, output_depth_attentions=True).depth_attentions
        assert len(weights) == len(expected), f"{len(weights)} sites read, {len(expected)} by definition"
        assert all(of_site.ndim > 2 for of_site in weights), "a layer's flat tokens are not those of the model"
        for actual, (_, of_site) in zip(weights, sorted(expected.items())):
            errors.append(relative(actual.flatten(0, -2), of_site.flatten(0, -2)))  # some layers flatten the tokens
        return max(errors)

    def measure_generation(self):
        """Cached against uncached, of the AttnRes model and of the base; cached against the base's at zero queries."""
        results = {"attnres": self.cached(self.model(3)), "base": self.cached(self.native)}
        outputs, of_base = self.generated(self.model(3, random=False)), self.generated(self.native)
        results["to_base"] = relative(torch.stack(outputs.logits), torch.stack(of_base.logits))
        return results

    def generated(self, model, **kwargs):
        kwargs |= {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        return model.generate(self.input_ids, **kwargs)

    def cached(self, model):
        outputs = self.generated(model)
        with torch.no_grad():
            expected = model(outputs.sequences[:, :-1], use_cache=False).logits[:, -6:]
        return relative(torch.stack(outputs.logits, 1), expected)

    def measure_padding(self):
        """Generation from a prompt with padding in front of it against the prompt alone, of both models."""
        alone = self.input_ids[:1]
        padded = torch.nn.functional.pad(alone, (3, 0), value=0)
        mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
        kwargs = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        results = {}
        for name, model in (("attnres", self.model(3)), ("base", self.native)):
            expected = model.generate(alone, **kwargs).logits
            actual = model.generate(padded, attention_mask=mask, **kwargs).logits
            results[name] = relative(torch.stack(actual), torch.stack(expected))
        return results

    def measure_packing(self):
        """The second of two documents in a row against itself alone, and whether fine-tuning would pack them."""
        model, first, second = self.model(3), self.input_ids[:1, :6], self.input_ids[1:, :5]
        positions = torch.tensor([[*range(6), *range(5)]])
        with torch.no_grad():
            packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits[:, 6:]
            difference = relative(packed, model(second, use_cache=False).logits)
        return {"difference": difference, "reason": cannot_pack(model.config) or sees_other_documents(model)}

    def measure_kv_cache(self):
        with torch.no_grad():
            outputs = self.model(3)(self.input_ids, use_cache=True)
        for name in ("cache", "past_key_values", "cache_params", "state"):
            if outputs.get(name) is not None:
                return type(outputs[name]).__name__
        return None

    def measure_block_caches(self):
        """How many block caches a generation makes: one, unless its steps do not find that of the step before."""
        with mock.patch.object(BlockCache, "__init__", autospec=True, side_effect=BlockCache.__init__) as made:
            self.generated(self.model(3), use_cache=True)  # mpt has no KV cache otherwise
        return made.call_count

    def measure_gradients(self):
        """Parameters that have a gradient in the base and none in the AttnRes model; queries without one."""
        model = without_dropout(self.model(3, random=False)).train()  # so that routers choose as in the base
        native = without_dropout(self.native).train()
        try:
            ids = self.input_ids
            torch.manual_seed(3)
            model(ids, labels=ids, use_cache=False).loss.backward()
            torch.manual_seed(3)
            native(ids, labels=ids, use_cache=False).loss.backward()
            have = {n for n, p in native.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
            lost = [n for n, p in model.named_parameters() if n in have and (p.grad is None or not p.grad.abs().sum())]
            queries = model.base_model.depth_queries.query.grad.abs().sum(-1)
            return {"lost": lost[:5], "queries_without": queries.eq(0).nonzero().flatten().tolist()}
        finally:
            model.eval(), native.eval(), model.zero_grad(), native.zero_grad()

    def measure_checkpointing(self):
        """How far gradients with activation checkpointing are from those without, and of the base the same."""
        if not self.native.supports_gradient_checkpointing:
            return "not supported by the base"
        results = {}
        for reentrant in (False, True):
            name = "reentrant" if reentrant else "not reentrant"
            results[name] = self.checkpointed(self.model(3), reentrant)
            del self.models[3]
            if results[name] > 1e-12:
                results[f"{name}, base"] = self.checkpointed(copy.deepcopy(self.native), reentrant)
        return results

    def checkpointed(self, model, reentrant: bool) -> float:
        gradients = []
        without_dropout(model).train()
        for checkpointing in (False, True):
            model.zero_grad()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                if reentrant:
                    model.enable_input_require_grads()
            torch.manual_seed(3)
            model(self.input_ids, labels=self.input_ids, use_cache=False).loss.backward()
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        return relative(*(torch.cat([g.flatten() for g in of_run]) for of_run in reversed(gradients)))

    def measure_compile(self):
        """Of both models, captured as one graph: how far its logits are from those without, or why there is none."""
        results = {}
        for name, model in (("attnres", self.model(3)), ("base", self.native)):
            torch._dynamo.reset()
            try:
                with torch.no_grad(), contextlib.ExitStack() as stack:
                    if getattr(model.config, "num_experts_per_tok", None) is not None:  # loops cannot be captured
                        stack.callback(model.set_experts_implementation, "eager")
                        model.set_experts_implementation("batched_mm")
                    expected = model(self.input_ids, use_cache=False).logits
                    compiled = torch.compile(model, backend="eager", fullgraph=True)
                    results[name] = relative(compiled(self.input_ids, use_cache=False).logits, expected)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return results

    def measure_save_and_load(self):
        model = self.model(2)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            reloaded, info = AttnResForCausalLM.from_pretrained(
                folder, output_loading_info=True, dtype=model.dtype, experts_implementation="eager"
            )
            problems = {name: sorted(found)[:3] for name, found in info.items() if found}
            difference = relative(
                reloaded(self.input_ids, use_cache=False).logits, model(self.input_ids, use_cache=False).logits
            )
        return {"difference": difference, **problems}

    def measure_flags(self):
        model = self.native
        return {
            "dtype": str(self.logits.dtype),
            "compile_fullgraph": bool(model._can_compile_fullgraph),
            "tp_plan": bool(model._tp_plan or model.base_model._tp_plan or model.config.base_model_tp_plan),
            "checkpointing": bool(model.supports_gradient_checkpointing),
            "flash": bool(model._supports_flash_attn),
            "sdpa": bool(model._supports_sdpa),
            "flex": bool(model._supports_flex_attn),
            "attention_backend": bool(model._supports_attention_backend),
            "stateful": bool(getattr(model, "_is_stateful", False)),
            "tied": bool(getattr(model.config, "tie_word_embeddings", False)),
        }


def message(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    native = [f for f in frames if "/models/" in f.filename]
    if native:
        place += f", in {Path(native[-1].filename).name}:{native[-1].lineno}"
    return f"{type(error).__name__}: {str(error)[:400]} ({place})"


def survey(model_type: str, leave_out: Sequence[str] = ()) -> dict:
    results = measure(model_type, all_in_fp64(), leave_out)
    if "Double" in str(results):  # products in groups of experts are not there in fp64
        results = measure(model_type, contextlib.nullcontext(), leave_out)
    if "refused" not in results and "error" not in results and "conversion" not in leave_out:
        try:
            results["conversion"] = convert_and_revert(model_type)
        except Exception as error:
            results["conversion"] = {"error": message(error)}
    return results


def convert_and_revert(model_type: str) -> dict:
    """A checkpoint in fp32, converted with a comparison of the two, and back."""
    with tempfile.TemporaryDirectory() as folder:
        base, converted, reverted = (Path(folder, name) for name in ("base", "converted", "reverted"))
        native_model(decoder_config(model_type)).save_pretrained(base)
        report = convert(base, converted, block_size=3)
        revert(converted, reverted)
        of_base, of_reverted = (json.loads((path / "config.json").read_text()) for path in (base, reverted))
        return {
            "equal": report.verification.equal,
            "sublayers": report.num_sublayers,
            "same_weights": all(filecmp.cmp(path, reverted / path.name, False) for path in base.glob("*.safetensors")),
            "changed_fields": sorted(name for name in of_base if of_reverted.get(name) != of_base[name]),
        }


def measure(model_type: str, precision, leave_out: Sequence[str]) -> dict:
    results = {}
    with precision:
        try:
            measured = Survey(model_type)
        except Exception as error:
            return {"error": "native: " + message(error)}
        results["flags"] = measured.measure_flags()
        try:
            results["sublayers"] = measured.measure_sublayers()
        except Exception as error:
            return {**results, "refused" if "not supported" in str(error) else "error": message(error)}
        names = [name for name in dir(measured) if name.startswith("measure_")]
        for name in names:
            key = name.removeprefix("measure_")
            if key not in results and key not in leave_out:
                try:
                    results[key] = getattr(measured, name)()
                except Exception as error:
                    results[key] = {"error": message(error)}
    return results


def main(path: str, *model_types: str):
    logging.disable(logging.WARNING)
    known = {*DECODERS, *NOT_DECODERS}
    unknown = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - known)
    if unknown:
        raise SystemExit(f"Types that nobody has looked at: {', '.join(unknown)}")
    file = Path(path)
    results = json.loads(file.read_text()) if file.exists() else {}
    for model_type in model_types or [name for name in DECODERS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]:
        if model_type in results and not model_types:
            continue
        torch.manual_seed(0)
        results[model_type] = survey(model_type)
        file.write_text(json.dumps(results, indent=1))
        print(model_type, json.dumps(results[model_type])[:2000], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
