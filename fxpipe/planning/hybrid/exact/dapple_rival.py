"""DAPPLE's planner beside the search for the optimal plan, so that the answer is never slower than DAPPLE's plan.

A case whose bound is not below the best plan needs no other planner. For the others that DAPPLE's planner would try by
itself, and for those with as many micro-batches as the best plan, its search is run to its end. It can be interrupted
and goes on at the next call. Its warm-up matters only where memory is short: a search for late warm-up in which every
plan fits would be the same for early warm-up, which needs less memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from fxpipe.planning.hybrid.dapple import DappleSearch
from fxpipe.planning.hybrid.plan_request import EXACT, FEW, Request

from .search_phases import Case, PlanSearch


@dataclass
class Rival:
    """The searches of DAPPLE's planner by number of micro-batches, warm-up and sharding, and the cases that have their
    plan."""

    hunt: PlanSearch
    request: Request
    searches: dict[tuple[int, str, str], DappleSearch] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)

    def ask(self, until: float) -> None:
        """Offer DAPPLE's plan to each open case; end at `until`, by `perf_counter`."""
        while (waiting := self._waiting()) and perf_counter() < until:
            index = waiting[0]
            search = self._search(self.hunt.cases[index])
            if search.run(until):
                self.compared.add(index)
                self.hunt.offer(index, self.hunt.cases[index].shapes.shape(search.stages))

    @property
    def unfinished(self) -> int:
        """How many cases there are in which DAPPLE's plan may be faster."""
        return len(self._waiting())

    def _waiting(self) -> list[int]:
        """The cases to compare with, those like the best plan first."""
        hunt, own = self.hunt, self.hunt.case.problem.micro_batches if self.hunt.case else 0
        tried = {own, *self.request.counts(FEW)}

        def may_be_faster(index: int) -> bool:
            case = hunt.cases[index]
            needed = case.problem.micro_batches in tried and case.bound < hunt.time * (1 - EXACT)
            return needed and index not in self.compared

        def order(index: int) -> tuple[bool, int, bool]:
            problem = hunt.cases[index].problem
            return problem.micro_batches != own, problem.micro_batches, problem.warmup == "early"

        return sorted(filter(may_be_faster, range(len(hunt.cases))), key=order)

    def _search(self, case: Case) -> DappleSearch:
        problem = case.problem
        late = self.searches.get((problem.micro_batches, "late", problem.optimizer_sharding))
        if late is not None and late.ended and not late.lacked:
            return late
        key = problem.micro_batches, problem.warmup, problem.optimizer_sharding
        if key not in self.searches:
            self.searches[key] = DappleSearch(problem, recomputes=True)
        return self.searches[key]
