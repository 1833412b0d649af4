"""The queue that stands in the place of the trainer's: samples pass in their order, but for dead groups'.

A group is judged by its samples as they come. The first one that shows life lets all of its samples pass, so that only
samples of groups that may still turn out to be dead are held up, with those behind them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty
from typing import Any

import numpy as np
import torch

from .. import compat
from ..data.counters import COUNTERS, Tally
from ..data.types import Groups, Ints, ReplayedRows
from ..serialization.samples import decoded, encoded
from ..setup.components import Components
from ..setup.settings import Settings
from ..step.decisions import SOLVED, Decisions
from .groups import HELD, Arriving, Reading, samples_of
from .view import TrainerView

GRACE = 0.05
"""Seconds that a further sample of an incomplete group may take, or any sample before a stored group is drawn."""
OPEN_GROUPS = 4
"""Groups whose samples may come in turns; of more, the first one is taken for complete."""
REMEMBERED = 256
"""Complete groups that late samples are recognised of."""
DROUGHT = 64
"""Dead groups dropped in a row; the next one passes, so that training goes on where nothing is live."""
WAITED = "the worker was waited for"
SPENT = "half of max_staleness is spent on waiting: samples on their way must not get stale"
PASSED = f"a dead group passed: {DROUGHT} before it were dropped, and nothing was live"
UNTRAINED = "not trained yet"


@dataclass(slots=True, eq=False)
class Handed:
    """A sample on its way to the trainer.

    Attributes:
        sample (`Any`): TRL's sample.
        serial (`int`): Of its group; -1 where nothing is decided about it.
        group ([`Arriving`], *optional*): What it waits for the verdict on; None if it passes.
        replayed (`bool`): From the buffer: it gets the present version.
    """

    sample: Any
    serial: int = -1
    group: Arriving | None = None
    replayed: bool = False


class ReplayQueue:
    """Reads the worker's queue for the trainer's dataset. Only the main process has one.

    Args:
        inner (`Any`): The worker's queue.
        view ([`TrainerView`]): The trainer.
        settings ([`Settings`]): Limits.
        components ([`Components`]): Buffer, hooks and counters.
        decisions ([`Decisions`]): What all trainers' groups go through.
        reading ([`Reading`]): How samples are read.
        serials (`Callable`): Gives the next group's serial number.

    Attributes:
        dropped (`int`): Dead groups that were dropped.
        waited (`int`): Groups that were replayed because nothing else was there.
        window ([`Tally`]): Counters since the last metrics.
        mode (`Callable`): Tells whether the queue decides: not while replay is paused, nor after `detach`.
    """

    def __init__(
        self,
        inner: Any,
        view: TrainerView,
        settings: Settings,
        components: Components,
        decisions: Decisions,
        reading: Reading,
        serials: Callable[[], int],
    ) -> None:
        self.inner = inner
        self.decides: Callable[[], bool] = lambda: True
        self.window = Tally()
        self.dropped = 0
        self.waited = 0
        self._view = view
        self._dry = settings.config.replay_dry_run
        self._weight = settings.config.replay_weight
        self._retires = settings.config.replay_retire_passes
        self._components = components
        self._decisions = decisions
        self._reading = reading
        self._serials = serials
        self._line: deque[Handed] = deque()
        self._given: deque[Handed] = deque()
        self._open: dict[int, Arriving] = {}
        self._known: dict[int, bool] = {}  # by id: whether the group was dropped
        self._in_a_row = 0
        self._next_id = -1
        self._version = -1
        self._synced_at = 0
        self._arrived_at = 0  # the version at which a sample came last
        self._restored = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def qsize(self) -> int:
        """Count samples that wait here and in the worker's queue."""
        return int(self.inner.qsize()) + len(self._line)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next sample for the trainer.

        Raises:
            queue.Empty: None came in time, and nothing could be replayed.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        self.note_version()
        while True:
            given = self._pass_on()
            if given is not None:
                return given
            if self._receive(0.0) or self._close(lambda group: len(group.rows) >= self._reading.size):
                continue
            may_replay = self._may_replay_waiting()
            if (self._open or may_replay) and self._receive(GRACE):
                continue
            if self._close(lambda group: True) or (may_replay and self._replay_waiting()):
                continue
            left = None if ends is None else ends - time.monotonic()
            if not block or (left is not None and left <= 0):
                raise Empty
            self._arrive(self.inner.get(timeout=left))

    def note_version(self) -> None:
        """Take note of the version that is live, and of the update at which it was synced."""
        version = int(self._view.model_version)
        if self._restored:  # versions count from elsewhere since: all stay as old as they were
            self._restored = False
            self._version = version
            self._arrived_at += version
            for sample in self._held():
                sample.model_version += version
        if version != self._version:
            self._version = version
            self._synced_at = self._components.clock.update

    def trained(self) -> None:
        """Forget the samples of an update that is done, and that replayed ones would count in an epoch."""
        for _ in range(min(compat.step_samples(self._view.own), len(self._given))):
            self._given.popleft()
        trained = self._view.trained
        trained.difference_update([number for number in trained if number < 0])

    def end(self) -> None:
        """Forget the samples that the trainer has fetched and will not train on."""
        self._given.clear()

    def _held(self) -> Iterator[Any]:
        """All samples that are here, each once."""
        seen = {id(handed.sample): handed.sample for handed in (*self._given, *self._line)}
        for group in self._open.values():
            seen |= {id(sample): sample for sample in group.rows}
        yield from seen.values()

    def _receive(self, timeout: float) -> bool:
        try:
            sample = self.inner.get(timeout=timeout)
        except Empty:
            return False
        self._arrive(sample)
        return True

    def _arrive(self, sample: Any) -> None:
        self._arrived_at = self._version
        number = int(sample.group_id)
        if not self.decides():
            self._let_pass()
            self._line.append(Handed(sample))
            return
        if number in self._known:
            self._arrive_late(sample)
            return
        group = self._open.get(number)
        if group is None:
            group = self._open[number] = Arriving(number, self._serials())
        group.rows.append(sample)
        self._line.append(Handed(sample, group.serial, group))
        group.live = group.live or self._reading.are_live(group.rows)
        whole = [
            other for other in self._open.values() if other is not group and len(other.rows) >= self._reading.size
        ]
        if len(self._open) > OPEN_GROUPS:
            whole.append(next(iter(self._open.values())))
        for other in whole:
            if other.id in self._open:
                self._judge(other)

    def _let_pass(self) -> None:
        """Decide nothing about groups whose samples are coming: what comes later of them passes, too."""
        self._known |= dict.fromkeys(self._open, False)
        self._open.clear()
        for handed in self._line:
            handed.group = None

    def _arrive_late(self, sample: Any) -> None:
        """A further sample of a group that was taken for complete: it passes, unless the group was dropped and it has
        nothing to train on either."""
        if self._known[int(sample.group_id)] and self._reading.is_dead([sample]):
            return
        self._line.append(Handed(sample))

    def _close(self, chosen: Callable[[Arriving], bool]) -> bool:
        """Take groups for complete: nothing else is there. Tell whether there were any."""
        closing = [group for group in self._open.values() if chosen(group)]
        for group in closing:
            self._judge(group)
        return bool(closing)

    def _judge(self, group: Arriving) -> None:
        """Decide about a complete group: it passes and is stored, or it is dropped and another one takes its place."""
        del self._open[group.id]
        payload = self._reading.payload(group.rows)
        view = self._reading.view(group.rows, self._born(group.rows[0]), payload)
        tally = Tally(groups=1)
        solved = self._decisions.solve([view], tally)
        self._components.buffer.retire(self._components.clock.update)
        self._count(tally)
        dead = bool(view.dead[0]) and not group.live
        drops = dead and not self._dry and self._in_a_row < DROUGHT
        self._known[group.id] = drops
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        if not dead:
            self._in_a_row = 0
            self._store(group, view, payload, len(solved) > 0)
        elif self._dry:
            self._draw(view)
        elif not drops:
            self._in_a_row = 0
            self._count(Tally(dead_after=1, reasons=_once(PASSED)))
        if drops:
            self._in_a_row += 1
            self.dropped += 1
            self._view.trained.add(group.id)
            self._replace(group, [] if (drawn := self._draw(view)) is None else drawn)
        else:
            self._replace(group, None)

    def _replace(self, group: Arriving, by: list[Handed] | None) -> None:
        """Let a group's samples pass, or put others in their place."""
        line: deque[Handed] = deque()
        for handed in self._line:
            if handed.group is not group:
                line.append(handed)
            elif by is None:
                handed.group = None
                line.append(handed)
            else:
                line.extend(by)
                by = []
        self._line = line

    def _store(self, group: Arriving, view: Groups, payload: Any, solved: bool) -> None:
        if not self._components.buffer.capacity:
            return
        tally = Tally()
        if solved:
            tally.refuse(1, SOLVED)
        elif not np.isfinite(view.behavior_logps).all():  # type: ignore[arg-type]  # a view has them
            tally.refuse(1, "a trainable token's log-prob is not finite")
        elif self._decisions.offer(view, [group.serial], [payload.nbytes], [HELD], tally):
            self._components.buffer.receive({group.serial: payload})
        self._count(tally)

    def _born(self, sample: Any) -> int:
        """Updates done when a sample's policy was synced."""
        behind = max(self._version - int(sample.model_version), 0) * int(self._view.args.weight_sync_steps)
        return max(min(self._synced_at, self._components.clock.update) - behind, 0)

    def _draw(self, slot: Groups | None) -> list[Handed] | None:
        """A stored group's samples; None where nothing may be replayed. Of a dry run it is only counted."""
        components, buffer = self._components, self._components.buffer
        update = components.clock.update
        tally = Tally()
        limiter = components.rate_limiter
        most, limit = limiter.slots_allowed(int(components.totals.counters["generated"]), update)
        try:
            if not buffer.capacity:
                return None
            if components.totals.counters["replaced"] >= most:
                tally.note(1, f"{limit} allows no further group")
                return None
            buffer.retire(update)
            context = components.context(slot)
            waiting = {handed.serial for handed in (*self._line, *self._given)}
            held = components.hooks.eligible(buffer.table, context)
            held |= {UNTRAINED: np.isin(buffer.table.serial, list(waiting))}
            eligible, reasons = buffer.eligible(update, frozenset(), held)
            if not len(eligible):
                tally.note(1, self._decisions.shortage(reasons))
                return None
            table = buffer.table.take(eligible)
            drawn = components.hooks.sample(table, 1, context).ravel()
            drawn = drawn[drawn >= 0]
            if not len(drawn):
                tally.note(1, "the sampler drew nothing for a group")
                return None
            chance = float(self._decisions.chances(table)[drawn[0]])
            return self._take(eligible[drawn[:1]], chance, tally)
        finally:
            self._count(tally)

    def _take(self, entry: Ints, chance: float, tally: Tally) -> list[Handed]:
        """Replay an entry, and count it."""
        components, buffer = self._components, self._components.buffer
        table, update = buffer.table, components.clock.update
        age = int(update - table.update[entry][0])
        group = buffer.load(int(table.serial[entry][0]))
        rows = len(group.completion_lengths)
        components.rate_limiter.drawn += 1
        buffer.use(entry)
        tally.replaced = tally.entries = 1
        tally.rows = self._reading.size
        tally.age, tally.uses = float(age), float(table.uses[entry][0])
        tally.score = float(table.score[entry][0])
        zeros = torch.zeros(rows, 1)
        given = components.hooks.correct(
            ReplayedRows(
                logps=zeros,
                behavior_logps=zeros,
                proximal_logps=zeros,
                mask=torch.ones(rows, 1, dtype=torch.bool),
                advantages=torch.tensor(group.tensors["advantages"].tolist()),
                ages=torch.full((rows,), age),
                priorities=torch.full((rows,), chance),
            ),
            components.local_context(),
        )
        weights = np.ones(rows) if given.weights is None else given.weights.double().numpy()
        number, self._next_id = self._next_id, self._next_id - 1
        samples = [replace(one, group_id=number) for one in samples_of(group, weights * self._weight)]
        return [Handed(sample, replayed=True) for sample in samples]

    def _may_replay_waiting(self) -> bool:
        """Tell whether a stored group may be handed out because nothing else is there."""
        if self._line or self._dry or not self.decides() or not len(self._components.buffer):
            return False
        if 2 * (self._version - self._arrived_at + 1) > self._view.args.max_staleness:
            return False
        return self._decisions.draws_for_any

    def _replay_waiting(self) -> bool:
        """Hand out a stored group, if the worker is well. Tell whether there was one."""
        self._view.rollout_worker.check_health(self._view.args.heartbeat_stale_after_s)
        drawn = self._draw(None)
        self._line.extend(drawn or [])
        self.waited += drawn is not None
        return drawn is not None

    def _pass_on(self) -> Any:
        """Return the first sample that nothing holds up; None if there is none."""
        if not self._line or not (self._line[0].group is None or self._line[0].group.live or not self.decides()):
            return None
        handed = self._line.popleft()
        sample = handed.sample
        if handed.replayed:
            sample.model_version = self._version
        staleness = self._version - int(sample.model_version)
        budget = int(self._view.args.token_budget or 0)
        oversize = 0 < budget < len(sample.input_ids)
        if staleness <= self._view.args.max_staleness and not oversize:  # else the trainer drops it at once
            self._given.append(handed)
        return sample

    def _count(self, tally: Tally) -> None:
        """Add counters to those of the run and to those since the last metrics."""
        counted = {name: getattr(tally, name) for name in COUNTERS}
        for name, value in counted.items():
            setattr(self.window, name, getattr(self.window, name) + value)
        self._components.totals.add(tally, batches=0, of_all_ranks=counted)

    @contextmanager
    def counted_as_trained(self) -> Iterator[None]:
        """While a checkpoint is written: groups that it holds need not be generated again on resuming."""
        numbers = {int(handed.sample.group_id) for handed in (*self._given, *self._line)}
        if compat.restarts_worker(self._view):
            numbers -= set(self._open)
        new = {number for number in numbers if number >= 0} - self._view.trained
        self._view.trained.update(new)
        try:
            yield
        finally:
            self._view.trained.difference_update(new)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: samples that are not trained on yet, and where counting stands."""
        restarts = compat.restarts_worker(self._view)  # and generates incomplete groups again
        places: dict[int, int] = {}
        groups = [] if restarts else list(self._open.values())
        samples: list[Any] = []

        def place(sample: Any) -> int:
            if id(sample) not in places:
                places[id(sample)] = len(samples)
                samples.append(encoded(sample, self._version))
            return places[id(sample)]

        handed = [one for one in (*self._given, *self._line) if not (restarts and one.group in self._open.values())]
        return {
            "handed": [[place(one.sample), one.serial, _id(one.group), one.replayed] for one in handed],
            "open": [[group.id, group.serial, group.live, [place(row) for row in group.rows]] for group in groups],
            "samples": samples,
            "known": [] if restarts else [[number, dropped] for number, dropped in self._known.items()],
            "dropped": self.dropped,
            "waited": self.waited,
            "in_a_row": self._in_a_row,
            "next_id": self._next_id,
            "since_sync": self._components.clock.update - self._synced_at,
            "since_arrival": self._version - self._arrived_at,
            "window": {name: float(getattr(self.window, name)) for name in COUNTERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave: samples that the trainer had fetched come first again."""
        samples = [decoded(one) for one in state["samples"]]
        self._open = {
            number: Arriving(number, serial, [samples[row] for row in rows], live)
            for number, serial, live, rows in state["open"]
        }
        self._line = deque(
            Handed(samples[row], serial, self._open.get(number), replayed)
            for row, serial, number, replayed in state["handed"]
        )
        self._given.clear()
        self._known = dict(state["known"])
        self.dropped, self.waited = state["dropped"], state["waited"]
        self._in_a_row, self._next_id = state["in_a_row"], state["next_id"]
        self._synced_at = self._components.clock.update - state["since_sync"]
        self._arrived_at = -state["since_arrival"]
        self.window = Tally(**state["window"])
        self._restored = True
        if compat.restarts_worker(self._view):  # which counts from 0 again
            self._renumber()

    def _renumber(self) -> None:
        numbers: dict[int, int] = {}
        for handed in self._line:
            number = int(handed.sample.group_id)
            if number >= 0 and number not in numbers:
                numbers[number], self._next_id = self._next_id, self._next_id - 1
            handed.sample.group_id = numbers.get(number, number)


def _once(reason: str) -> Any:
    tally = Tally()
    tally.note(1, reason)
    return tally.reasons


def _id(group: Arriving | None) -> int | None:
    return None if group is None else group.id
