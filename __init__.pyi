# SPDX-License-Identifier: Apache-2.0
# What `__init__.py` imports when it is first used, for type checkers and editors. A test compares the two
from .configuration_attnres import AttnResConfig as AttnResConfig
from .depth.backends import get_backend as get_backend
from .depth.backends import set_backend as set_backend
from .depth.block_cache import BlockCache as BlockCache
from .depth.recorder import DepthRecorder as DepthRecorder
from .depth.stream import DepthStream as DepthStream
from .modeling_attnres import AttnResForAudioClassification as AttnResForAudioClassification
from .modeling_attnres import AttnResForCausalLM as AttnResForCausalLM
from .modeling_attnres import AttnResForCTC as AttnResForCTC
from .modeling_attnres import AttnResForImageClassification as AttnResForImageClassification
from .modeling_attnres import AttnResForMaskedLM as AttnResForMaskedLM
from .modeling_attnres import AttnResForQuestionAnswering as AttnResForQuestionAnswering
from .modeling_attnres import AttnResForSeq2SeqLM as AttnResForSeq2SeqLM
from .modeling_attnres import AttnResForSequenceClassification as AttnResForSequenceClassification
from .modeling_attnres import AttnResForSpeechSeq2Seq as AttnResForSpeechSeq2Seq
from .modeling_attnres import AttnResForTokenClassification as AttnResForTokenClassification
from .modeling_attnres import AttnResModel as AttnResModel
from .modeling_attnres import AttnResPreTrainedModel as AttnResPreTrainedModel
from .multimodal_attnres import AttnResForConditionalGeneration as AttnResForConditionalGeneration
from .multimodal_attnres import AttnResMultimodalConfig as AttnResMultimodalConfig

__version__: str
