"""Every drafter with a fitted target on disk, in an engine that tests step by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ON_CPU, ModelPlacement
from drafter_svc.model.standalone import StandaloneDrafter
from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.drafter import Drafter
from foretoken.models.config import load_config
from foretoken.models.element_type import DType
from foretoken.tree import depths
from tests.references import head_files
from tests.references.heads import ReferenceEagle, ReferenceEagle3, ReferenceHead, ReferenceMimo, ReferenceQwen3Next
from tests.support.engine_harness import Harness
from tests.support.fitted_models import TARGET_STEPS, fit_head, fit_target, perturb
from tests.support.grammars import END, VOCAB, ids_of, write_tokenizer
from tests.support.tiny_checkpoint import save_tokenizer
from verifier_svc.messages import SequenceKey
from verifier_svc.model.runner import ModelRunner
from verifier_svc.model.target_runner import TargetRunner
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence

BLOCK = 8
FINAL_STATE = (-1,)
EAGLE3_LAYERS = (2, head_files.NUM_LAYERS // 2, head_files.NUM_LAYERS - 3)
# Ids that the EAGLE-3 head can draft: all of the text's tokens except one.
DRAFT_IDS = sorted({*range(head_files.DRAFT_VOCAB + 3)} - set(ids_of("7", "[", "}")))
# Bodies without MTP layers.
WITHOUT_MTP = ("llama", "mistral", "qwen2")
# By drafter: the target's body, and the drafters that are attached.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("llama", ()),
    "EAGLE": ("llama", ("EAGLE",)),
    "EAGLE3": ("llama", ("EAGLE3",)),
    "STANDALONE": ("llama", ("STANDALONE",)),
    "NGRAM": ("llama", ("NGRAM",)),
    "merge": ("llama", ("EAGLE3", "NGRAM")),
    "MTP MiMo": ("mimo", ("MTP",)),
    "MTP MiMo of two layers": ("mimo 2", ("MTP",)),
    "MTP Qwen3-Next": ("qwen3", ("MTP",)),
}


@dataclass
class Walks:
    """One sequence's verified trees: accepted levels and levels in all, one entry a step."""

    accepted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def num_refused(self) -> int:
        """Return the number of steps whose walk left the tree before its end."""
        return sum(a < d for a, d in zip(self.accepted, self.depths, strict=True))


class Target:
    """One target with its heads, fitted unless ``steps`` is 0.

    It is made once a test session, as that takes seconds.
    """

    def __init__(
        self, folder: Path, name: str, *, steps: int = TARGET_STEPS, vocab_size: int = head_files.VOCAB
    ) -> None:
        self.folder = folder / "target"
        self.num_depths = 2 if name.endswith("2") else 1
        self.references: dict[str, ReferenceHead] = {}
        self.head_folders: dict[str, Path] = {}
        self.model: PreTrainedModel = self._make(name, vocab_size)
        if steps:
            fit_target(self.model, self.folder, steps=steps)
        self._is_fitted = steps > 0
        self._write_tokenizer(self.folder)
        self.config = load_config(self.folder)
        if name == "llama" or not steps:
            self._make_heads(folder, vocab_size)
        if name not in WITHOUT_MTP:
            self._add_head("MTP", self.folder, FINAL_STATE)
        self._runners: dict[tuple[int, DType], ModelRunner] = {}

    def _make(self, name: str, vocab_size: int) -> PreTrainedModel:
        if name in WITHOUT_MTP:
            return head_files.random_target(self.folder, name, vocab_size=vocab_size)
        if name == "qwen3":
            return head_files.qwen3_mtp_target(self.folder, vocab_size=vocab_size)
        return head_files.mimo_target(self.folder, self.num_depths, vocab_size=vocab_size)

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the grammars' tokenizer if the vocabulary is large enough."""
        vocab_size = self.model.config.vocab_size
        if vocab_size >= VOCAB:
            write_tokenizer(folder)
        else:
            save_tokenizer(folder, [f"w{i}" for i in range(vocab_size)])

    def _make_heads(self, folder: Path, vocab_size: int) -> None:
        head_files.write_folder(folder / "EAGLE", *head_files.eagle_files())
        has_grammars = vocab_size >= VOCAB
        config, tensors = head_files.eagle3_files(layer="layers.0", head=has_grammars)
        if has_grammars:
            ids = torch.tensor(DRAFT_IDS)
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        head_files.write_folder(folder / "EAGLE3", config, tensors)
        self._add_head("EAGLE", folder / "EAGLE", FINAL_STATE)
        self._add_head("EAGLE3", folder / "EAGLE3", EAGLE3_LAYERS)
        self.standalone = folder / "STANDALONE"
        self.model.save_pretrained(self.standalone)
        self._write_tokenizer(self.standalone)
        perturb(self.standalone, 0.3)

    def _add_head(self, name: str, folder: Path, layers: tuple[int, ...]) -> None:
        kinds: dict[str, type[ReferenceHead]] = {"EAGLE": ReferenceEagle, "EAGLE3": ReferenceEagle3}
        mtp = ReferenceQwen3Next if self.config.model_type == "qwen3" else ReferenceMimo
        kind = kinds.get(name, mtp)
        if self._is_fitted:
            fit_head(kind(folder, self.folder), folder, self.model, layers, num_depths=self.num_depths)
        self.references[name] = kind(folder, self.folder)
        self.head_folders[name] = folder

    def drafter(self, algorithm: str, placement: ModelPlacement = ON_CPU) -> Drafter:
        if algorithm == "NGRAM":
            return NgramDrafter(NgramSettings(capacity=20_000))
        if algorithm == "STANDALONE":
            return StandaloneDrafter(self.standalone, placement=placement)
        folder = None if algorithm == "MTP" else self.head_folders[algorithm]
        return HeadDrafter(algorithm, folder, placement=placement)  # type: ignore[arg-type]

    def runner(self, num_blocks: int, dtype: DType = "float32") -> ModelRunner:
        """Return one runner for each size and type of the cache; no test uses an earlier one's
        entries."""
        key = num_blocks, dtype
        if key not in self._runners:
            runner = ModelRunner(self.folder, dtype=dtype, threads=1, num_blocks=num_blocks, block_size=BLOCK)
            runner.warm_up()
            assert runner.mode == "strict"
            self._runners[key] = runner
        return self._runners[key]

    def harness(
        self,
        drafters: Mapping[str, Drafter],
        *,
        num_blocks: int = 256,
        runner: TargetRunner | None = None,
        dtype: DType = "float32",
        **options: Any,
    ) -> SeenHarness:
        """Return an engine; ``runner``: this target elsewhere than on the CPU."""
        settings: dict[str, Any] = {
            "vocab_size": self.config.vocab_size,
            "token_limit": VOCAB,
            "eos_ids": frozenset({END}),
            "num_steps": 3,
            "branches": 2,
            "max_nodes": 8,
            **options,
        }
        return SeenHarness(
            runner or self.runner(num_blocks, dtype),
            num_blocks=num_blocks,
            block_size=BLOCK,
            drafters=drafters,
            hidden_size=self.config.hidden_size,
            num_layers=self.config.num_layers,
            checkpoint=str(self.folder),
            **settings,
        )


class SeenHarness(Harness):
    """A harness that keeps the results of the walks through each sequence's trees."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.walks: dict[SequenceKey, Walks] = {}
        observe = self.speculator.outcomes.observe

        def seen(sequence: Sequence, draft: Draft, matched: list[int], shares: Any) -> None:
            walks = self.walks.setdefault(sequence.key, Walks())
            walks.accepted.append(len(matched))
            walks.depths.append(int(depths(draft.tree.parents).max()))
            observe(sequence, draft, matched, shares)

        self.speculator.outcomes.observe = seen  # type: ignore[method-assign, assignment]


class Targets:
    """Targets by name, each made when it is first asked for."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """Keep ``options`` for every target."""
        self._folder = folder
        self._options = options
        self._made: dict[str, Target] = {}

    def __getitem__(self, name: str) -> Target:
        if name not in self._made:
            self._made[name] = Target(self._folder / name, name, **self._options)
        return self._made[name]

    def of_kind(self, kind: str, placement: ModelPlacement = ON_CPU) -> tuple[Target, dict[str, Drafter]]:
        """Return a target with fresh drafters, by their names."""
        target_name, algorithms = KINDS[kind]
        target = self[target_name]
        return target, {algorithm.lower(): target.drafter(algorithm, placement) for algorithm in algorithms}
