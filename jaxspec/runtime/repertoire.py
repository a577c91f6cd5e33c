"""What a runner can run: the list of its executables, and the order in which they are wanted.

Must not know how any is lowered (`programs`), nor run one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxspec.runtime.programs import (
    AdmitKey,
    CatchUpKey,
    DraftKey,
    ForwardKey,
    GuidedKey,
    Key,
    LogprobsKey,
    MixedKey,
    PrefillKey,
    RememberKey,
    RoundKey,
    SettleKey,
)
from jaxspec.scheduling.shapes import PrefillShape
from jaxspec.speculation.typical import Typical
from jaxspec.tier import PLAIN, Tier


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """What a runner can run.

    Attributes:
      reachable: {tier: buckets} that the policy can select.
      prefill_shapes: for prompts, ascending; the first is of one chunk.
      prefill_overhead: what a call for prompts costs beside its size, in tokens (scheduling.shapes.cover).
      prefill_unsampled: sizes of single chunks that run without the output layer where they end no prompt.
      eos: token ids that min_tokens bans besides a request's own stop ids.
      variants: which rounds to compile: False for greedy ones, True for sampled ones (which serve every batch).
      rejection, typical: how drafts of sampled rows are verified (speculation.round.RoundSpec).
      guided: whether rounds and prefills can be told what rows may say.
      budgets: {(tier, bucket): tokens} of the packed rounds that the policy can select besides.
      rounds: of one dispatch, in the buckets `repeated`, where every node is verified.
      mixed: chunks of prompts that a round takes along, where every node is verified; None: none. In `mixed_buckets`.
    """

    reachable: Mapping[Tier, tuple[int, ...]]
    prefill_shapes: Sequence[PrefillShape]
    prefill_overhead: int = 8
    prefill_unsampled: Sequence[int] = ()
    eos: Sequence[int] = ()
    variants: tuple[bool, ...] = (False, True)
    rejection: bool = False
    typical: Typical | None = None
    guided: bool = False
    budgets: Mapping[tuple[Tier, int], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    rounds: int = 1
    repeated: tuple[int, ...] = ()
    mixed: PrefillShape | None = None
    mixed_buckets: tuple[int, ...] = ()

    @property
    def buckets(self) -> list[int]:
        return sorted({bucket for buckets in self.reachable.values() for bucket in buckets})

    def prefill(self, shape: PrefillShape, samples: bool = True) -> PrefillKey:
        return PrefillKey(shape, self.guided, samples)

    @property
    def prefill_keys(self) -> list[Key]:
        """The executables that prompts may need."""
        whole = [shape for shape in self.prefill_shapes if shape.rows == 1 and shape.size in self.prefill_unsampled]
        logprobs = [LogprobsKey(rows, 1, 1) for rows in sorted({shape.rows for shape in self.prefill_shapes} | {1})]
        return [
            AdmitKey(), *logprobs, *map(self.prefill, self.prefill_shapes),
            *(self.prefill(shape, False) for shape in whole),
        ]  # fmt: skip

    def round_keys(self, tier: Tier, bucket: int) -> list[Key]:
        """The executables that a round of a tier may need."""
        nodes = tier.num_nodes
        keys: list[Key] = [RoundKey(tier, bucket, sampled) for sampled in self.variants]
        if self.guided and tier.depth:
            keys += [DraftKey(tier, bucket), ForwardKey(nodes, bucket), SettleKey(tier, bucket)]
        elif self.guided:
            keys.append(GuidedKey(bucket))
        return [*keys, LogprobsKey(bucket, nodes, tier.depth + 1)]

    def packed_keys(self, tier: Tier, bucket: int, tokens: int) -> list[Key]:
        """The executables that a packed round of a tier may need; ValueError for one that is not among `budgets`."""
        known = self.budgets.get((tier, bucket), ())
        if tokens not in known:
            raise ValueError(f"{tier} at batch size {bucket} cannot verify {tokens} tokens; compiled are {list(known)}")
        keys: list[Key] = [RoundKey(tier, bucket, sampled, tokens) for sampled in self.variants]
        return [*keys, LogprobsKey(bucket, tier.num_nodes, tier.depth + 1, tokens)]

    def repeated_keys(self, tier: Tier, bucket: int) -> list[Key]:
        """The executables of several rounds of a tier."""
        return [RoundKey(tier, bucket, sampled, rounds=self.rounds) for sampled in self.variants]

    def mixed_keys(self, tier: Tier, bucket: int) -> list[Key]:
        """The executables that a round of a tier needs which takes chunks of prompts along; none where it cannot.

        Of one variant: what serves every batch. Prompts come too seldom for rounds of greedy batches of their own.
        """
        if self.mixed is None or bucket not in self.mixed_buckets:
            return []
        return [MixedKey(tier, bucket, max(self.variants), self.mixed), LogprobsKey(self.mixed.rows, 1, 1)]

    def keys(self, *, catches_up: bool, remembers: bool = False) -> list[Key]:
        """Every executable; the dearest first, so that no thread ends with one.

        Args:
          catches_up: whether the drafter has a cache in which rounds that it does not draft leave gaps.
          remembers: whether it has a corpus.
        """
        keys = [key for tier, at in self.reachable.items() for bucket in at for key in self.round_keys(tier, bucket)]
        for (tier, bucket), budgets in self.budgets.items():
            keys += [key for tokens in budgets for key in self.packed_keys(tier, bucket, tokens)]
        for tier, at in self.reachable.items():
            keys += [key for bucket in at if bucket in self.repeated for key in self.repeated_keys(tier, bucket)]
            keys += [key for bucket in at for key in self.mixed_keys(tier, bucket)]
        if catches_up and any(tier == PLAIN or tier.lookup for tier in self.reachable):
            keys += [CatchUpKey(bucket) for bucket in self.buckets]
        if remembers:
            keys.append(RememberKey())
        keys += self.prefill_keys
        weight = lambda key: key.tier.depth if isinstance(key, RoundKey | MixedKey) else -isinstance(key, LogprobsKey)
        return sorted(dict.fromkeys(keys), key=weight, reverse=True)

    @property
    def first_tiers(self) -> tuple[Tier, ...]:
        """With which to begin at the smallest batch: the least, and the likeliest of those that draft."""
        buckets, tiers = self.buckets, sorted(self.reachable)
        least = next(tier for tier in tiers if buckets[0] in self.reachable[tier])  # not every policy decodes plainly
        drafting = [tier for tier in tiers if tier.depth and tier != least]
        return least, *drafting[len(drafting) // 2 : len(drafting) // 2 + 1]

    @property
    def first_keys(self) -> list[Key]:
        """The executables of these tiers: with them an engine drafts where that pays, and else does not."""
        at, tiers = self.buckets[0], self.first_tiers
        keys = [key for tier in tiers if at in self.reachable[tier] for key in self.round_keys(tier, at)]
        return [*keys, CatchUpKey(at)]

    def order(self, keys: Sequence[Key]) -> dict[Key, int]:
        """When each key's turn comes, from 0, which the first request waits for."""
        buckets, tiers = self.buckets, sorted(self.reachable)
        least, *likely = self.first_tiers
        turns: dict[Key, int] = {key: 3 for key in self.prefill_keys}
        turns |= dict.fromkeys((AdmitKey(), LogprobsKey(1, 1, 1), *map(self.prefill, self.prefill_shapes[:1])), 0)
        turns |= dict.fromkeys((*self.round_keys(least, buckets[0]), RememberKey()), 0)
        ends = [(at, tier) for at in (buckets[0], buckets[-1]) for tier in (least, *likely)]
        rest = [(at, tier) for at in buckets for tier in tiers]
        for turn, (bucket, tier) in enumerate([*ends, *rest]):
            if bucket in self.reachable[tier]:
                catch_up = [CatchUpKey(bucket)] if tier.depth else []
                for key in [*self.round_keys(tier, bucket), *catch_up]:
                    turns[key] = min(turns.get(key, turn + 1), turn + 1)  # prompts may need it as well
        # Packed rounds come last: they gain on whole ones, which already run. At the largest batches they gain most.
        last = len(rest) + len(ends)
        for (tier, bucket), budgets in self.budgets.items():
            for key in (key for tokens in budgets for key in self.packed_keys(tier, bucket, tokens)):
                turns.setdefault(key, last + 1 + buckets[::-1].index(bucket))
        return {key: turns.get(key, last) for key in keys}
