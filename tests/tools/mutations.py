# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - code as it stands in the files
"""Break the core in many ways, one at a time, and see that a test fails each time.

    python tests/tools/mutations.py [NUMBER ...]    # all of them, or some: about a minute each

Each is made in a copy of the package, which stands in front of the installed one. Not a test itself: it runs tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).parents[2]
OPERATOR = ("tests/test_depth_attention.py", "tests/test_two_phases.py", "tests/test_depth_stream.py")
READS = ("tests/test_reads.py",)
MERGING = ("tests/test_merging.py",)
RECORDER = ("tests/test_recorder.py",)
PRUNE = ("tests/test_prune.py",)
ENCODER_DECODERS = ("tests/test_encoder_decoders.py",)
HUB_KERNELS = ("tests/test_hub_kernels.py",)
GRADIENTS = ("tests/test_gradients.py",)
PRETRAINING = ("tests/test_pretrain.py",)
# Slow tests run where the fast ones have not failed: all of a file, or those that `pytest -k` chooses here
SLOW = {
    "tests/test_pretrain.py": "tensor_parallelism or stages",
    "tests/test_parallel.py": "every_family or files_of_a_run or two_processes",
    "tests/test_decoders.py": "test_decoder",
}
PIPELINES = ("tests/test_plan.py", "tests/test_parallel.py")
STREAM = ("tests/test_depth_stream.py", "tests/test_two_phases.py", "tests/test_lost_stream.py")
MODEL = ("tests/test_loading.py", "tests/test_families.py", "tests/test_training.py", "tests/test_generation.py")
# File, what stands in it, what is put in its place, and the tests that are to notice
MUTATIONS = [
    # The operator
    ("depth/autograd.py", "norm = norm_with(ctx.norm, dict(zip(ctx.tensor_names, of_norm)))", "norm = norm_with(ctx.norm, {})", GRADIENTS),
    ("depth/autograd.py", "ctx.norm, ctx.tensor_names = norm_with(how.norm, {}), list(norm_tensors(how.norm))", "ctx.norm, ctx.tensor_names = how.norm, list(norm_tensors(how.norm))", GRADIENTS),
    ("depth/two_phases.py", "if norm is not None and norm._modules:", "if False:", GRADIENTS),
    ("depth/stream.py", "scores[..., masked] = -torch.inf", "scores[..., masked] = 0", ("tests/test_depth_stream.py", "tests/test_inspection.py")),
    ("depth/autograd.py", "through_norm = (to_query * scores).sum((0, -1)).unsqueeze(-1) / l2_norm", "through_norm = (to_query * scores).sum((0, -1)).unsqueeze(-1)", OPERATOR),
    ("depth/autograd.py", "grad_source = grad_source.addcmul_(through_norm, values, value=-1)", "grad_source = grad_source.addcmul_(through_norm, values)", OPERATOR),
    ("depth/autograd.py", "to_query, values = grad / l2_norm, by_head", "to_query, values = grad / l2_norm.square(), by_head", OPERATOR),
    ("depth/autograd.py", "torch.zeros_like(like[..., i]) if grad is None else grad", "torch.ones_like(like[..., i]) if grad is None else grad", (*OPERATOR, *READS)),
    ("depth/autograd.py", "grad_source = torch.addcmul(to_query * by_head(query, num_heads), through_norm, values, value=-1)", "grad_source = torch.addcmul(to_query * by_head(query, num_heads), through_norm, values, value=-0.99)", READS),
    ("depth/autograd.py", "        state = torch.logaddexp(state, torch.zeros_like(state))", "        pass", READS),
    ("depth/autograd.py", "of_closed = of_closed * state.sigmoid()", "of_closed = of_closed * 1", READS),
    ("depth/autograd.py", "if ctx.unpacked is None:", "if True:", ("tests/test_training.py",)),
    ("depth/autograd.py", "of_scores.sub_((of_closed * of_scores).sum(0))", "of_scores.sub_((of_closed * of_scores).mean(0))", OPERATOR),
    ("depth/autograd.py", "                    of_scores.add_(of_state)", "                    pass", OPERATOR),
    ("depth/autograd.py", "through_norm = to_query.mul_(scores).sum((1, 3)).T / l2_norms", "through_norm = to_query.mul_(scores).sum((1, 3)).T / l2_norms.square()", OPERATOR),
    ("depth/autograd.py", "                grad_values.view(num_heads, -1, width).baddbmm_(flat, queries_by_head(queries, num_heads))", "                pass", OPERATOR),
    ("depth/autograd.py", "of_mixes = values.new_zeros if any(grad is None for grad in grads[: ctx.num_sites]) else values.new_empty", "of_mixes = lambda *shape: values.new_full(shape, 1e30)", OPERATOR),
    ("depth/autograd.py", "        return (scores[0] - state).sigmoid().unsqueeze(0)", "        return (scores[0] - 0.999 * state).sigmoid().unsqueeze(0)", OPERATOR),
    ("depth/autograd.py", "null = [torch.zeros_like(scores[0])] if how.weights == \"softmax1\" and not has_mix else []", "null = []", READS),
    ("depth/autograd.py", "total.addcmul_(weight, value)", "total.addcmul_(weight, value, value=0.999)", OPERATOR),
    ("depth/autograd.py", "grad_mix = grad - grad_value if needs_mix else None", "grad_mix = grad if needs_mix else None", OPERATOR),
    ("depth/autograd.py", "return grad_mix, -grad_score, [grad_score], [grad_value]", "return grad_mix, grad_score, [grad_score], [grad_value]", OPERATOR),
    ("depth/autograd.py", "of_scores = torch.addcmul(weighted, weights, weighted.sum(0), value=-1)", "of_scores = torch.addcmul(weighted, weights, weighted.sum(0), value=-0.5)", OPERATOR),
    ("depth/autograd.py", "grad_mix = closed * grad if needs_mix else None", "grad_mix = grad if needs_mix else None", OPERATOR),
    ("depth/autograd.py", "        grad_values.addcmul_(to_query.unsqueeze(-1), query.view(values.shape[1:]))", "        pass", OPERATOR),
    ("depth/autograd.py", "grad_values.addcmul_(through_norm.unsqueeze(-1), values, value=-1)\n    if not", "grad_values.addcmul_(through_norm.unsqueeze(-1), values)\n    if not", OPERATOR),
    ("depth/autograd.py", "kept_mix = mix if how.closed is None else None", "kept_mix = None", (*OPERATOR, *MODEL, "tests/test_peft.py")),
    ("depth/autograd.py", "mean = torch.mv(product, wide_weight).unsqueeze(-1).div_(total.shape[-1])", "mean = torch.mv(product, wide_weight).unsqueeze(-1)", OPERATOR),
    ("depth/autograd.py", "value=-1).div_(rms)", "value=-1)", OPERATOR),
    ("depth/autograd.py", "grad = grad if how.factor == 1 or rms is not None else grad * how.factor", "grad = grad", OPERATOR),
    ("depth/two_phases.py", "known.source is source and known.with_grad >= torch.is_grad_enabled()", "known.source is source", STREAM),
    ("depth/two_phases.py", "known.source is source and known.with_grad", "known.with_grad", STREAM),
    ("depth/two_phases.py", "if before is not None and before.with_grad != self.with_grad:", "if False:", STREAM),
    ("depth/two_phases.py", "return is_one and (self.with_grad or not torch.is_grad_enabled())", "return is_one", STREAM),
    ("depth/two_phases.py", "return min((site // block_size + blocks) * block_size, num_sites)", "return (site // block_size + blocks) * block_size", OPERATOR),
    ("depth/two_phases.py", "how.eps_norm, of_norm = self.eps_norm_of(eps / factor**2), (weight,)", "how.eps_norm, of_norm = self.eps_norm_of(eps), (weight,)", OPERATOR),
    ("depth/block_cache.py", "total = torch.lerp(partial, mix, weight.sigmoid_())", "total = torch.lerp(partial, mix, weight.sigmoid_() * 1.0001)", OPERATOR),
    ("depth/block_cache.py", "total = torch.bmm(weights[:, None, :count], since).squeeze(1).addcmul_(of_closed, mix)", "total = torch.bmm(weights[:, None, :count], since).squeeze(1).add_(mix)", OPERATOR),
    ("depth/block_cache.py", "total = torch.baddbmm(mix.unsqueeze(1), weights[:, None, :count], since).squeeze(1)", "total = torch.bmm(weights[:, None, :count], since).squeeze(1)", (*READS, *OPERATOR)),
    ("depth/block_cache.py", "total.addcmul_(weights[:, i : i + 1], value.reshape(total.shape))", "total.addcmul_(weights[:, :1], value.reshape(total.shape))", (*OPERATOR, *READS)),
    ("depth/block_cache.py", "result = result.clone() if result.data_ptr() == total.data_ptr() and not open_sources else result", "pass", OPERATOR),
    ("depth/block_cache.py", "            how.eps_norm = self.reader.eps_norm_of(eps / factor**2)", "            how.eps_norm = self.reader.eps_norm_of(eps)", (*OPERATOR, *MODEL)),
    ("depth/block_cache.py", "first = number * self.block_size", "first = (number + 1) * self.block_size", OPERATOR),
    ("depth/block_cache.py", "self.l2_norms[:, number : number + 1] = l2_norm", "self.l2_norms[:, number : number + 1] = l2_norm.square()", READS),
    ("depth/one_token.py", "mix = torch.lerp(mix, value, weight)", "mix = torch.lerp(mix, value, weight * 1.0001)", OPERATOR),
    ("depth/one_token.py", "vector.shape[0] + eps / factor**2)", "vector.shape[0] + eps)", (*OPERATOR, *MODEL)),
    ("depth/one_token.py", "mix = torch.add(mix, value, alpha=weight)", "mix = torch.add(mix, value, alpha=weight * 1.0001)", OPERATOR),
    ("depth/one_token.py", "mix = torch.addcmul(mix, value, weight)", "mix = torch.addcmul(mix, value, weight * 1.0001)", OPERATOR),
    ("depth/one_token.py", "mix.add_(value).add_(self.closed_sum)", "mix.add_(self.closed_sum)", OPERATOR),
    ("depth/one_token.py", "self.closed_sum.add_(value) if self.scores else self.closed_sum.copy_(value)", "self.closed_sum.add_(value)", OPERATOR),
    ("depth/one_token.py", "mix = mix + self.closed_sum", "mix = mix + 1.001 * self.closed_sum", OPERATOR),
    ("depth/one_token.py", "(math.exp(-largest) if with_one else 0)", "0", OPERATOR),
    ("depth/one_token.py", "max(*scores, 0.0) if with_one else max(scores)", "max(scores)", OPERATOR),
    ("depth/one_token.py", "torch.bmm(queries, vector.view(self.num_heads, -1, 1), out=products)", "products = torch.bmm(queries, vector.view(self.num_heads, -1, 1))", OPERATOR),
    ("depth/block_cache.py", 'is_softmax = self.read_config.weights == "softmax"', "is_softmax = state is not None", OPERATOR),
    ("depth/one_token.py", "-largest - math.log(total)", "-largest - 1.001 * math.log(total)", OPERATOR),
    ("depth/kernel_phases.py", "list(grads[ctx.num_sites :]) or [None] * ctx.num_sites", "[None] * ctx.num_sites", ("tests/test_backends.py",)),
    ("depth/stream.py", "chunk.has(self.site, len(self.blocks))", "chunk.first <= self.site", STREAM),
    ("depth/reads.py", '"softmax1": num_sources + 1', '"softmax1": num_sources', READS),
    ("depth/stream.py", 'and self.read_config.weights == "softmax"', "", READS),
    ("depth/stream.py", "return new if self.cache is None else new.keep_in(BlockCache())\n\n    def on_sources", "return new\n\n    def on_sources", STREAM),
    ("training/depth_metrics.py", "if isinstance(of_evaluation, dict):", "if False:", READS),
    ("depth/norms.py", "named = {**own[\"_parameters\"], **own[\"_buffers\"], **own}", "named = {**own[\"_parameters\"], **own[\"_buffers\"]}", GRADIENTS),
    ("depth/backends.py", "return _backend == \"reference\" or torch._C._are_functorch_transforms_active()", "return _backend == \"reference\"", GRADIENTS),
    ("depth/norms.py", 'if "variance_epsilon" not in own:', 'if "variance_epsilon" not in own and "eps" not in own:', (*OPERATOR, *MODEL)),
    # The stream
    ("depth/stream.py", "if site % self.block_size:", "if (site + 1) % self.block_size:", STREAM),
    ("depth/stream.py", "partial = output if self.partial is None else self.partial + output", "partial = output if self.partial is None else self.partial.detach() + output", (*STREAM, *MODEL)),
    ("depth/stream.py", "mix = None if torch.is_grad_enabled() else self.mix", "mix = self.mix", (*STREAM, *MODEL)),
    ("depth/stream.py", "return cache if is_current and source.dtype == cache.dtype else None", "return cache if source.dtype == cache.dtype else None", STREAM),
    ("depth/stream.py", "if self.cache is not None and self.cache.num_passes != self.cache_pass:", "if False:", STREAM),
    ("depth/stream.py", "            new.mix = self.newest  # not the copy, which the next forward pass overwrites", "            pass", (*STREAM, *MODEL)),
    ("depth/tensor_like.py", 'if name == "dropout" and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):', 'if name == "dropout":', STREAM),
    ("depth/tensor_like.py", "            return self.on_sources(lambda source: source * other)\n", "            return self\n", (*STREAM, *MODEL)),
    ("depth/tensor_like.py", "if isinstance(other, torch.Tensor) and other.shape == self.newest.shape:", "if True:", STREAM),
    ("depth/tensor_like.py", "        new.mix = None\n", "        new.mix = self.mix\n", (*STREAM, *MODEL)),
    ("depth/stream.py", "if self.pending_dtype is not None or output.dtype != self.newest.dtype:", "if output.dtype != self.newest.dtype:", STREAM),
    ("depth/stream.py", "pending_dtype = None if read_as == dtype else read_as", "pending_dtype = None", STREAM),
    ("depth/tensor_like.py", 'raise TypeError(f"`{name}` works in place', 'print(f"`{name}` works in place', STREAM),
    ("depth/stream.py", "inner_stream = stream.tree_unflatten(inner, context)", "inner_stream = stream.tree_unflatten([*inner[:2], *(t.detach() for t in inner[2:])], context)", MODEL[1:]),
    # The model
    ("depth/queries.py", "else self.query.to(dtype) * key_norm", "else self.query.to(dtype) + 0 * key_norm", MODEL),
    ("depth/queries.py", "return tensor.to(applied.device) if applied.dtype in (torch.float16, torch.bfloat16) else applied", "return applied", MODEL),
    ("modeling_attnres.py", "if not isinstance(stream, DepthStream) or stream.site != exit_site:", "if not isinstance(stream, DepthStream):", STREAM),
    ("modeling_attnres.py", "if not isinstance(stream, DepthStream) or stream.site != entry_site:", "if not isinstance(stream, DepthStream):", STREAM),
    ("modeling_attnres.py", "scale_by_sources=config.attn_res_scale_norm_eps,", "scale_by_sources=False,", MODEL),
    ("modeling_attnres.py", "eps=config.attn_res_norm_eps,", "eps=1e-6,", MODEL[1:]),
    ("depth/queries.py", "if block_size != self.block_size:", "if False:", ("tests/test_peft.py", "tests/test_finetune.py")),
    ("base/probe.py", "    if not isinstance(stream, DepthStream):\n        reason = f", "    if False:\n        reason = f", ("tests/test_lost_stream.py", "tests/test_loading.py", "tests/test_probe.py")),
    ("base/probe.py", "probed.num_writes = stream.site - sum(earlier.num_writes for earlier in self.probed)", "probed.num_writes = 2", ("tests/test_probe.py",)),
    ("base/probe.py", "if len(self.probed) >= len(self.layers) or layer is not self.layers[len(self.probed)]:", "if False:", ("tests/test_probe.py",)),
    ("data/packing.py", "if gradient[:, :first].count_nonzero() == 0:", "if True:", ("tests/test_finetune_data.py",)),
    ("multimodal_attnres.py", "self.text_config = AttnResConfig.from_dict(self.text_config or {})", "pass", ("tests/test_multimodal.py",)),
    ("depth/tensor_like.py", "newest[self.mask] + added)", "newest[self.mask])", ("tests/test_depth_stream.py",)),
    ("base/config.py", "if not has_lm_head and (inside or has_own", "if (inside or has_own", ("tests/test_multimodal.py", "tests/test_encoders.py")),
    ("multimodal_attnres.py", "    base_model = PreTrainedModel.base_model", "    pass", ("tests/test_multimodal.py",)),
    ("modeling_attnres.py", "part.__class__ = combined_class(ours, type(part), part.config.base_model_type)", "pass", ("tests/test_multimodal.py",)),
    ("configuration_attnres.py", "def validate_layer_type(self):", "def validate_nothing(self):", ("tests/test_decoders.py",)),
    ("configuration_attnres.py", "return member.fget(self)", "return member.__get__(self, type(self))", ("tests/test_decoders.py",)),
    ("depth/tensor_like.py", "if name in _IN_PLACE:", 'if name.endswith("_"):', ("tests/test_decoders.py",)),
    # Other reads
    ("depth/definition.py", "        return powers / (nothing + powers)", "        return powers / (nothing + powers) + 9", READS),
    ("depth/other_reads.py", "new.outputs = () if new.partial is None else (*self.outputs, output)", "new.outputs = (*self.outputs, output)", READS),
    ("depth/other_reads.py", "query = self.sources[-1].to(gamma.dtype)", "query = self.blocks[-1].to(gamma.dtype)", READS),
    ("depth/other_reads.py", "new.outputs, new.read_config = tuple(leaves[:num_outputs]), read_config", "new.read_config = read_config", READS),
    ("depth/other_reads.py", "new.projections = tuple(leaves[:num_projections])", "new.projections = tuple(t.detach() for t in leaves[:num_projections])", READS),
    ("depth/recorder.py", "        return tensor.unflatten(0, self.tokens)", "        return tensor", ("tests/test_depth_stream.py", "tests/test_decoders.py", "tests/test_families.py")),
    ("depth/queries.py", "if of_read else ReadConfig()\n        if read_config != self.read_config:", "if of_read else ReadConfig()\n        if False:", READS),
    ("depth/queries.py", "read_config = ReadConfig.of(config)\n        if read_config != self.read_config:", "read_config = ReadConfig.of(config)\n        if False:", READS),
    ("depth/queries.py", "init.normal_(tensor, std=self.std)", "init.zeros_(tensor)", READS),
    ("depth/reads.py", "        if given != expected:", "        if False:", READS),
    ("training/optimizer.py", '.endswith(".key_norm") else args.query_weight_decay', '.endswith(".key_norm") or "projection" in names[id(parameter)] else args.query_weight_decay', READS),
    ("inspection/measure.py", "self.agreement += common.mean(-1).sum().item()", "self.agreement += common.amax(-1).sum().item() * 0.9", READS),
    ("conversion/converter.py", "        torch.manual_seed(0)\n", "        torch.seed()\n", READS),
    # Pipelines
    ("parallel/routing.py", "if cache and block in known[rank] and block not in own", "if cache and block in known[rank]", PIPELINES),
    ("parallel/routing.py", "known[rank].update(received[-1], closed[stage])", "known[rank].update(received[-1])", PIPELINES),
    ("parallel/stage.py", "            self.store.deposit((self._microbatch, block), changed.pop())", "            changed.pop()", PIPELINES),
    ("parallel/stage.py", "            if block in self.route.closed:", "            if False:", PIPELINES),
    ("parallel/stage.py", "            leaf.grad = None  # which some", "            pass  # which some", PIPELINES),
    ("parallel/stage.py", "tensor.clone() if keeps or tensor.is_leaf or tensor._is_view() else tensor", "tensor", PIPELINES),
    ("parallel/stage.py", "block.detach().requires_grad_(block.requires_grad and torch.is_grad_enabled())", "block.detach()", PIPELINES),
    ("parallel/pipeline.py", "weight.grad = grad if weight.grad is None else grad + weight.grad", "pass", PIPELINES),
    ("parallel/pipeline.py", "vocab_size=self.config.vocab_size, num_items_in_batch=self.num_items", "vocab_size=self.config.vocab_size", PIPELINES),
    ("parallel/pipeline.py", "saved[key].clone()  # of copies", "saved[key]  # of copies", PIPELINES),
    ("parallel/pipeline.py", "found.setdefault(name, torch.empty_like(tensor))[start:end] = tensor[start:end]", "found[name] = tensor", PIPELINES),
    ("parallel/pipeline.py", "counted = [p.grad for _, p in self.named_parameters(copies=False)", "counted = [p.grad for _, p in self.named_parameters()", PIPELINES),
    ("parallel/plan.py", "    return idle / (idle + busy)", "    return idle / busy", PIPELINES),
    ("parallel/plan.py", "2 * (layout.pp - 1 - rank) + 1", "2 * (layout.pp - 1 - rank)", PIPELINES),
    ("parallel/prefill.py", "zip(gathered, self.token_counts)", "zip(gathered[::-1], self.token_counts)", PIPELINES),
    ("base/probe.py", "        if of_layer.given_more is not None:", "        if False:", PIPELINES),
    ("base/probe.py", "return config_class, model_class, content, *code", "return config_class, model_class, content", ("tests/test_probe.py",)),
    ("base/probe.py", "self.scales_blocks |= ", "self.scales_blocks = False and ", PIPELINES),
    ("base/probe.py", "    if width != base_config.hidden_size:", "    if False:", PIPELINES),
    ("base/slices.py", "present & (probe.behind - probe.in_front)", "present & probe.behind", PIPELINES),
    ("base/slices.py", "(hidden_states, *[None] * (self.num_values - 1))", "hidden_states", PIPELINES),
    ("base/slices.py", "(SliceEnd if i == end else PassThrough)", "PassThrough", PIPELINES),
    ("parallel/agreement.py", "    if found[0] != -found[1]:", "    if False:", PIPELINES),
    ("parallel/agreement.py", "        if different:", "        if False:", PIPELINES),
    ("parallel/pipeline.py", "if tensor.ndim and tensor.shape != parameter.shape:", "if False:", PIPELINES),
    ("parallel/prefill.py", "types.MethodType(functools.partial(start_divided, group=group), model.trunk)", "functools.partial(start_divided, model.trunk, group=group)", PIPELINES),
    # Pretraining
    ("data/packed_rows.py", "yield self._finished(row, (epoch, number, token))", "yield self._finished(row, (epoch, number, 0))", PRETRAINING),
    ("training/stages.py", 'model = load_language_model(checkpoint, dtype="float32")', "pass", PRETRAINING),
    ("training/optimizer.py", "            part.state = self.state\n", "", PRETRAINING),
    ("training/stages.py", "                dist.all_reduce(part, group=mesh.get_group())", "                pass", PRETRAINING),
    ("training/stages.py", "register_parameter(leaf, model.get_parameter(first))", "register_parameter(leaf, parameters[first])", PRETRAINING),
    ("parallel/pipeline.py", "return weight.grad.redistribute(placements=weight.placements)", "return weight.grad", PRETRAINING),
    ("parallel/stage.py", "keeps or tensor.is_leaf", "tensor.is_leaf", PIPELINES),
    # What is handed on between slices, seen and kept
    ("base/forward.py", "stream if depth_recorder is None else stream.with_recorder(depth_recorder)", "stream", ("tests/test_generation.py",)),
    ("base/forward.py", '        elif _is_final(outputs.get("last_hidden_state")):', "        elif False:", ("tests/test_generation.py",)),
    ("depth/stream.py", "        self.check_memory()\n        context", "        context", STREAM),
    ("base/slices.py", "    stream.check_memory()\n", "", STREAM),
    ("base/slices.py", "if not 0 <= start < end <= len(layers):", "if False:", ("tests/test_generation.py",)),
    ("modeling_attnres.py", "    forward = with_depth_attentions(GenericForSequenceClassification.forward)", "    pass", ("tests/test_loading.py",)),
    ("base/classes.py", " and not args and not kwargs", "", STREAM),
    ("depth/recorder.py", "masked is not None and (num_sources == 1 or not 0 <= masked < num_sources)", "False", STREAM),
    ("depth/other_reads.py", "return (() if self.partial is None else (self.partial,)) + self.outputs", "return *super().open_tensors, *self.outputs", READS),
    # The kept stream
    ("depth/autograd.py", "return mix if closed_sum is None else mix + closed_sum", "return mix", OPERATOR),
    ("depth/autograd.py", "return total.add_(values[0]).add_(closed_sum) if how.keeps_stream else total", "return total.add_(closed_sum) if how.keeps_stream else total", OPERATOR),
    ("depth/autograd.py", "of_local = of_local + 1 if how.keeps_stream else of_local", "of_local = of_local", OPERATOR),
    ("depth/autograd.py", "return total if closed_sum is None else total.add_(closed_sum)", "return total", OPERATOR),
    ("depth/autograd.py", "grad_value = grad_value.add_(grad) if how.keeps_stream else grad_value", "grad_value = grad_value", OPERATOR),
    ("depth/autograd.py", "grad_sum = grad if needed[4] else None", "grad_sum = None", OPERATOR),
    ("depth/two_phases.py", "for block in blocks[0 if before is None else before.num_closed :]:", "for block in blocks[:]:", OPERATOR),
    ("depth/two_phases.py", "read = (sum([*closed_sums, *sources], mixed) * factor)", "read = (sum([*sources], mixed) * factor)", ("tests/test_backends.py",)),
    ("depth/block_cache.py", "self.closed_sum.add_(block) if number else self.closed_sum.copy_(block)", "self.closed_sum.copy_(block)", OPERATOR),
    ("depth/block_cache.py", "return total if self.closed_sum is None else total.add_(partial).add_(self.closed_sum)", "return total if self.closed_sum is None else total.add_(self.closed_sum)", OPERATOR),
    ("depth/block_cache.py", "weights = weights if self.closed_sum is None else weights.add_(1)", "pass", OPERATOR),
    ("depth/block_cache.py", "weights[:, 1:] if self.closed_sum is None else weights[:, 1:] + 1", "weights[:, 1:]", OPERATOR),
    ("depth/block_cache.py", "self.num_closed, self.num_summed, self.chunk = 0, 0, (0, 0)", "self.num_closed, self.chunk = 0, (0, 0)", READS),
    ("depth/stream.py", "            weights[..., masked] = 0  # of the stream, too", "            pass", OPERATOR),
    ("depth/stream.py", "and not self.read_config.keeps_stream", "", OPERATOR),
    ("depth/reads.py", "return inverse_weight / (inverse_weight + 1) if self.keeps_stream else inverse_weight", "return inverse_weight", READS),
    ("depth/reads.py", "*(places if self.keeps_stream else places[:-1])", "*places", READS),
    # What a recorder changes
    ("depth/recorder.py", "edit(given)", "edit(tensor)", RECORDER),
    ("depth/recorder.py", "tensor.clone()", "tensor", RECORDER),
    ("depth/recorder.py", "edited.to(tensor)", "edited", RECORDER),
    ("depth/recorder.py", "last = num_sites - 2 if name", "last = num_sites - 1 if name", RECORDER),
    ("depth/recorder.py", "if not 0 <= source < len(seen):", "if source >= len(seen):", RECORDER),
    ("depth/recorder.py", "            output = self._edited(", "            self._edited(", RECORDER),
    ("depth/stream.py", "stream._replaced(blocks=closed, outputs=of_open_block)", "stream._replaced(blocks=closed)", RECORDER),
    ("depth/stream.py", "partial=of_open_block[0] if of_open_block else None", "partial=stream.partial", RECORDER),
    ("base/forward.py", "                depth_recorder.check_read()", "                pass", RECORDER),
    ("base/probe.py", "return {name: torch.zeros(2, getattr", "return {name: torch.zeros(1, getattr", ("tests/test_encoders.py",)),
    ("base/probe.py", "if probed.furthest_site > stream.site:", "if False:", ("tests/test_encoders.py",)),
    ("configuration_attnres.py", "CONFIG_MAPPING[base_model_type].__mro__", "base_config_class(base_model_type).__mro__", ("tests/test_encoders.py",)),
    ("modeling_attnres.py", '"__init__": base.__init__}', "}", ("tests/test_encoders.py",)),
    # Adapters, combined and mixed
    ("base/weighted_adapters.py", "wide(queries.get_parameter(name)) - of_model for", "wide(queries.get_parameter(name)) for", MERGING),
    ("base/weighted_adapters.py", "                    stack.depth_queries = wrapper\n", "                    pass\n", MERGING),
    ("base/weighted_adapters.py", "self.delete_adapter(adapter_name)", "pass", MERGING),
    ("depth/queries.py", "names is None or depth_queries.disable_adapters", "names is None", MERGING),
    ("depth/other_reads.py", "torch.addcmul(learned.unsqueeze(1), query, gamma.unsqueeze(1))", "(learned.unsqueeze(1) + query)", MERGING),
    ("depth/other_reads.py", "{\"read_config\": replace(read_config, query=\"hybrid\"), ", "{\"read_config\": read_config, ", MERGING),
    # Layers that are left out or repeated
    ("conversion/layers.py", "    return [*rows, config.num_sites - 1]", "    return [*rows, 0]", PRUNE),
    ("conversion/layers.py", "    return old == new", "    return True", PRUNE),
    ("conversion/layers.py", "elif number is not None and layers[number] in layers[:number]:", "elif False:", PRUNE),
    ("conversion/layers.py", "sum(old < value for old in layers)", "value", PRUNE),
    ("conversion/pruning.py", "            layers.remove(cheapest)", "            layers.pop()", PRUNE),
    # Kernels of a repository
    ("depth/kernels.py", "    if version != KERNELS_VERSION:", "    if False:", HUB_KERNELS),
    ("depth/kernels.py", "        if on_the_hub is None:", "        if on_the_hub is None or Path(name).is_dir():", HUB_KERNELS),
    ("depth/kernels.py", "trust_remote_code=trust_remote_code)", "trust_remote_code=True)", HUB_KERNELS),
    ("depth/backends.py", "    check_loaded(_loaded, tensor.device, tensor.dtype)\n", "", HUB_KERNELS),
    # Encoder-decoders
    ("modeling_attnres.py", "AttnResDepthQueries(stack.config, sum(sublayers) + 1)", "AttnResDepthQueries(stack.config, sum(sublayers) + 2)", ENCODER_DECODERS),
    ("modeling_attnres.py", "config.attn_res_sublayers = None  # of another", "pass  # of another", ENCODER_DECODERS),
    ("modeling_attnres.py", "inside = [module for layer in layers for module in layer.modules()]", "pass", ENCODER_DECODERS),
    ("base/forward.py", "if stack is self:  # called by an", "if True:  # called by an", ENCODER_DECODERS),
    ("base/forward.py", "            FORWARD_CONTEXT.recorders = outer\n", "            pass\n", ENCODER_DECODERS),
    ("base/forward.py", "        if self.training:\n            refuse_layerdrop(self)\n", "", ENCODER_DECODERS),
    ("base/forward.py", "for owner in (model, model.config):", "for owner in (model,):", ("tests/test_encoders.py",)),
    ("base/forward.py", "if kwargs.pop(\"depth_recorder\", None) is not None:", "if False:", ENCODER_DECODERS),
    ("depth/tensor_like.py", "return self.on_newest(lambda newest: function(newest, *args, **kwargs))", "return self", ENCODER_DECODERS),
    ("configuration_attnres.py", "num_sublayers = max(map(sum, stacks))", "num_sublayers = sum(map(sum, stacks))", ENCODER_DECODERS),
    ("configuration_attnres.py", "if name not in own}\n\n    def _remove", "}\n\n    def _remove", ENCODER_DECODERS),
    ("conversion/converter.py", "return -(-max(map(sum, config.sublayers_of_stacks()))", "return -(-sum(map(sum, config.sublayers_of_stacks()))", ENCODER_DECODERS),
    ("conversion/checks.py", "if depth != len(sublayers):", "if False:", ENCODER_DECODERS),
    ("base/probe.py", "base_config.is_encoder_decoder = True", "pass", ENCODER_DECODERS),
    ("checkpoints/checkpoint.py", "full = [prefix + name for prefix in self.query_prefixes for", "full = [prefix + name for prefix in self.query_prefixes[:1] for", ENCODER_DECODERS),
    ("base/weighted_adapters.py", "            for wrapper in wrappers.values():\n                wrapper.update", "            for wrapper in [*wrappers.values()][:1]:\n                wrapper.update", ENCODER_DECODERS),
    ("base/families.py", "if name not in of_encoders}", "}", ("tests/test_cli.py",)),
]  # fmt: skip


def killed_by(number: int, folder: Path) -> str:
    """The test that has failed, or nothing."""
    name, before, after, tests = MUTATIONS[number]
    package = folder / "attnres"
    ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "study", "peers")
    shutil.copytree(HERE, package, ignore=ignored)
    text = (package / name).read_text()
    if text.count(before) != 1:
        raise SystemExit(f"{number}: {name} does not have this once: {before}")
    (package / name).write_text(text.replace(before, after))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    slow = [["-m", "slow", "-k", SLOW.get(test, "test"), test] for test in tests]
    for chosen in (["-m", "not slow", *tests], *slow):
        result = subprocess.run([*command, *chosen], cwd=package, env=environment, capture_output=True, text=True)
        failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if result.returncode and failed:
            return failed[0].split(" - ")[0]
    return ""


def main():
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTATIONS))
    survivors = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            test = killed_by(number, Path(folder))
        if not test:
            survivors.append(number)
        name, _, after, _ = MUTATIONS[number]
        print(
            f"{number:2} {name}: {(after.strip() or 'nothing').splitlines()[0][:80]} | {test or 'SURVIVED'}",
            flush=True,
        )
    print(f"{len(numbers) - len(survivors)} of {len(numbers)} killed" + (f"; not {survivors}" if survivors else ""))
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
