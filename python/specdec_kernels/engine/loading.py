"""Preparations of an engine before it reads weights: sizes, names and the tokenizer; the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..models.shard import WHOLE
from ..models.weights.adapters import with_base
from ..models.weights.checkpoint import expect_folder
from ..models.weights.model_config import config_of, model_name
from ..parallel.launch import Place, place_of, sizes_of
from ..parallel.ranks import Ranks
from .config import EngineConfig, Machine, default_device, result_words
from .drafts import Draft
from .drafts.composition import walk
from .options import RING_DEPTH, EngineOptions
from .startup import FollowerRuntime, RankSources, Runtime, open_follower, open_runtime
from .text.prompts import load_tokenizer, own_tokenizer
from .tuning import calibrations_for, costs_for, read_tuning, rounds_of


@dataclass(frozen=True)
class Loading:
    """A target and a draft before they are loaded.

    Attributes:
        draft: as given, or a `Draft` that drafts nothing.
        options: of the engine.
        place: of this rank; None: the engine has one process.
        machine: of this rank.
        base: the target, without the adapter that is merged into it.
        adapter: that adapter's folder, or None.
        model_config: of the target.
        config: all sizes.
        target_name: of the target and its adapter.
        tuning: what was read of it; empty: nothing is known.
        calibrations: that the draft starts with.
        tokenizer: of the target; None: there is none, for the reason `no_tokenizer`.
    """

    draft: Draft
    options: EngineOptions
    place: Place | None
    machine: Machine
    base: str | Path | nn.Module
    adapter: Path | None
    model_config: Any
    config: EngineConfig
    target_name: str
    tuning: dict[str, Any]
    calibrations: list[dict[str, Any] | None]
    tokenizer: Any
    no_tokenizer: str

    @classmethod
    def of(
        cls, model: str | Path | nn.Module, draft: Draft, options: EngineOptions, place: Place | None = None
    ) -> Loading:
        """Resolve the options for a model and a draft.

        Raises:
            ValueError, OSError, TypeError: as `Engine`; a tuning with calibrations, and none of this draft.
        """
        tuning = {} if options.tuning is None else read_tuning(options.tuning)
        device = options.device if place is None else place.device(options.device, default_device())
        machine = Machine.of(device)
        expect_folder(model, "Engine: model")
        base, adapter = with_base(model, options.adapter)
        model_config = config_of(base)
        shard = WHOLE if place is None else place.shard
        config = EngineConfig.resolve(model_config, draft, machine, options, shard)
        tokenizer, no_tokenizer = load_tokenizer(
            base, options.tokenizer or own_tokenizer(adapter), options.trust_remote_code
        )
        if options.tokenizer is not None and tokenizer is None:
            raise ValueError(f"Engine: tokenizer is {options.tokenizer}, expected one that loads ({no_tokenizer})")
        target_name = "+".join(model_name(part) for part in (base, adapter) if part is not None)
        return cls(
            draft=draft,
            options=options,
            place=place,
            machine=machine,
            base=base,
            adapter=adapter,
            model_config=model_config,
            config=config,
            target_name=target_name,
            tuning=tuning,
            calibrations=calibrations_for(tuning, draft, target_name),
            tokenizer=tokenizer,
            no_tokenizer=no_tokenizer,
        )

    def with_modules(self) -> Loading:
        """Return the same with the modules of transformers in place of our layers."""
        options = replace(self.options, implementation="transformers")
        return replace(
            self, options=options, config=EngineConfig.resolve(self.model_config, self.draft, self.machine, options)
        )

    @property
    def rounds(self) -> dict[str, Any]:
        """Return what the costs of rounds depend on."""
        return rounds_of(self.model_config, self.draft, self.config, 1 if self.place is None else self.place.size)

    @property
    def channel_sizes(self) -> dict[str, int]:
        """Return the sizes of the channel between the ranks."""
        assert self.place is not None
        return sizes_of(self.place.size, RING_DEPTH, result_words(self.config))

    @property
    def agreed(self) -> dict[str, str]:
        """Return what has to be the same on all ranks, by name."""
        sizes = {each.name: repr(getattr(self.config, each.name)) for each in fields(self.config)}
        del sizes["machine"]
        kinds = "+".join(type(each).__name__ for each in walk(self.draft))
        return {"model": self.target_name, "draft": kinds} | sizes

    def sources(self, ranks: Ranks | None) -> RankSources:
        """Return what this rank loads."""
        return RankSources(
            model=self.base,
            draft=self.draft,
            config=self.config,
            adapter=self.adapter,
            tokenizer=self.tokenizer,
            no_tokenizer=self.no_tokenizer,
            ranks=ranks,
        )

    def open(self, ranks: Ranks | None) -> Runtime:
        """Load the models, on the rank with the scheduler."""
        return open_runtime(
            self.sources(ranks),
            calibrations=self.calibrations,
            costs=costs_for(self.tuning, self.rounds, self.config),
            trace=self.options.trace is not None,
            progress=self.options.progress,
        )

    def open_follower(self, ranks: Ranks) -> FollowerRuntime:
        """Load the models, on another rank."""
        return open_follower(self.sources(ranks))


def place_for(model: str | Path | nn.Module, options: EngineOptions) -> Place | None:
    """Return this process's place among the ranks that the options ask for.

    Raises:
        ValueError: options that more than one rank cannot have; what `place_of` refuses.
    """
    place = place_of(options.tp)
    if place is None:
        return None
    if options.implementation == "transformers":
        raise ValueError(f"Engine: implementation is transformers, expected native with tp={place.size}")
    if isinstance(model, nn.Module) and not place.by_torchrun:
        raise ValueError(
            f"Engine: model is a {type(model).__name__}, expected a path or hub id with tp={place.size}: each rank "
            "loads its part (or torchrun, where each rank passes the module, which is divided in place)"
        )
    return place
