# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What can be observed and changed in one forward pass: the weights, sources and outputs of the reads over depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch


# Gets a tensor, and changes it in place or returns another
Edit = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass
class DepthRecorder:
    """Records the reads and writes of one forward pass, and can change them.

    Pass it to a model as `depth_recorder=`. Every read then computes its weights, without a block cache.

    A function that edits is given a copy of a tensor, `[batch, seq, hidden]`. It may change the copy in place, or
    return another tensor of this shape, which is cast to the dtype of the model.

    Attributes:
        masked_source: by site, the source to leave out of the softmax. The site needs to have another one.
        edit_output: by site, a function of what the sublayer after it writes. All later reads see the result.
        edit_source: by site and source, a function of this source. Only this read sees the result: in its weights, in
            its mix, and in its query if that depends on the newest source.
        weights: by site, the weights of the embedding, the closed blocks and the partial sum, `[batch, seq, sources]`.
        outputs: by site, what the sublayer after it has written, `[batch, seq, hidden]`, or in the shape that a layer
            which flattens tokens gives it. Set it to `None` to keep none.
        sources: by site, what was read there, each `[batch, seq, hidden]`, if you set it to `{}`. By default none are
            kept, as they take memory.
        tokens: `[batch, seq]` of the forward pass, set by the model.
    """

    masked_source: dict[int, int] = field(default_factory=dict)
    edit_output: dict[int, Edit] = field(default_factory=dict)
    edit_source: dict[tuple[int, int], Edit] = field(default_factory=dict)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] | None = field(default_factory=dict)
    sources: dict[int, tuple[torch.Tensor, ...]] | None = None
    tokens: torch.Size | None = None

    def check(self, num_sites: int):
        """Raise a `ValueError` if something that is to be changed cannot be there, or has no function."""
        for place in self.edit_source:
            if not isinstance(place, tuple) or len(place) != 2:
                raise ValueError(f"`edit_source` has the key {place!r}, which has to be `(site, source)`.")
        for name, edits in (("edit_output", self.edit_output), ("edit_source", self.edit_source)):
            for place, edit in edits.items():
                if not callable(edit):
                    raise ValueError(f"`{name}[{place!r}]` has to be a function, and is a {type(edit).__name__}.")
        places = [("edit_output", site) for site in self.edit_output]
        for name, site in places + self._changed_reads():
            last = num_sites - 2 if name == "edit_output" else num_sites - 1  # nothing is written after the last read
            if not isinstance(site, Integral) or not 0 <= site <= last:
                raise ValueError(f"`{name}` has site {site!r}, which does not exist: they go from 0 to {last}.")

    def check_read(self):
        """Raise a `ValueError` if a site has not been read, at which something was to be changed."""
        for name, site in self._changed_reads():
            if site not in self.weights:
                raise ValueError(
                    f"`{name}` has site {site}, which this base never reads. It reads {sorted(self.weights)}."
                )

    def _changed_reads(self) -> list[tuple[str, int]]:
        masked = [("masked_source", site) for site in self.masked_source]
        return masked + [("edit_source", site) for site, _ in self.edit_source]

    def masked_at(self, site: int, num_sources: int) -> int | None:
        """The source that is left out at a site with some sources.

        Raises:
            ValueError: if it is not there, or the only one.
        """
        masked = self.masked_source.get(site)
        if masked is not None and (num_sources == 1 or not 0 <= masked < num_sources):
            raise ValueError(
                f"`masked_source={{{site}: {masked}}}` cannot be left out: site {site} has {num_sources} sources, of"
                " which one has to be read."
            )
        return masked

    def on_output(self, site: int, output: torch.Tensor) -> torch.Tensor:
        """What is written after a site, of what a sublayer has made."""
        edit = self.edit_output.get(site)
        if edit is not None:
            output = self._edited(edit, output, f"edit_output[{site}]")
        if self.outputs is not None:
            self.outputs[site] = output  # itself, as somebody may want its gradient
        return output

    def on_sources(self, site: int, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What is read at a site, of its sources.

        Raises:
            ValueError: if a source that is to be edited is not there.
        """
        seen = list(sources)
        for (of_site, source), edit in self.edit_source.items():
            if of_site != site:
                continue
            if not 0 <= source < len(seen):
                raise ValueError(
                    f"`edit_source` has source {source} of site {site}, which has {len(seen)}: they go from 0 to"
                    f" {len(seen) - 1}."
                )
            seen[source] = self._edited(edit, seen[source], f"edit_source[{site}, {source}]")
        if self.sources is not None:
            self.sources[site] = tuple(map(self.by_token, seen))
        return tuple(seen)

    def by_token(self, tensor: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
        """A layer's tensor as `[batch, seq, ...]`, also of one that flattens the tokens; `num_dims` follow them."""
        if self.tokens is None or tensor.shape[:-num_dims] != (self.tokens.numel(),):
            return tensor
        return tensor.unflatten(0, self.tokens)

    def _edited(self, edit: Edit, tensor: torch.Tensor, name: str) -> torch.Tensor:
        given = self.by_token(tensor.clone())
        edited = edit(given)
        edited = given if edited is None else edited
        if not isinstance(edited, torch.Tensor) or edited.shape != given.shape:
            found = list(edited.shape) if isinstance(edited, torch.Tensor) else f"a {type(edited).__name__}"
            raise ValueError(
                f"`{name}` has to return a tensor of the shape {list(given.shape)}, and returned {found}."
            )
        return edited.to(tensor).reshape(tensor.shape)  # of the dtype that the model computes in
