"""The queue that stands in the place of the trainer's: samples pass in their order, but for dead groups'.

A group is judged by its samples as they come. The first one that shows life lets all of its samples pass, so that only
samples of groups that may still turn out to be dead are held up, with those behind them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty
from typing import Any

import numpy as np

from trl_replay import compat
from trl_replay.buffer import Newcomer
from trl_replay.buffer.replay_buffer import OTHER_RULE
from trl_replay.data.counters import COUNTERS, Tally
from trl_replay.data.types import NONE, Floats, Groups, Ints
from trl_replay.serialization.groups import pack
from trl_replay.setup.settings import Components

from . import compat as asynchronous
from .encoding import decoded, encoded
from .groups import OpenGroup, SampleReader, TrainerView, can_train
from .samples import HELD, samples_of

GRACE, GAP = 0.05, 0.3
"""Seconds that a sample may take before a stored group is drawn, and a further sample of a group that has begun: TRL's
worker sleeps for 0.1 where its queue is full."""
OPEN_GROUPS = 4
"""Groups that may begin until the first one is taken for complete: samples may come in turns."""
REMEMBERED = 256
"""Complete groups that late samples are recognised of."""
DROUGHT = 64
"""Dead groups dropped in a row; the next one passes, so that training goes on where nothing is live."""
PASSED = f"a dead group passed: {DROUGHT} before it were dropped, and nothing was live"
UNTRAINED = "not trained yet"
COUNTS = ("dropped", "waited", "in_a_row", "next_id")
"""Attributes of the queue that a checkpoint keeps."""


@dataclass(slots=True, eq=False)
class QueuedSample:
    """A sample on its way to the trainer.

    Attributes:
        sample (`Any`): TRL's sample.
        serial (`int`): Of its group, or of the entry that it is of; -1 where nothing is decided about it.
        group ([`OpenGroup`], *optional*): What it waits for the verdict on; None if it passes.
        replayed (`bool`): From the buffer: it gets the present version.
    """

    sample: Any
    serial: int = -1
    group: OpenGroup | None = None
    replayed: bool = False


class ReplayQueue:
    """Reads the worker's queue for the trainer's dataset. Only the main process has one.

    Args:
        inner (`Any`): The worker's queue.
        view ([`TrainerView`]): The trainer.
        components ([`Components`]): The buffer, and what its session is made of.
        reading ([`SampleReader`]): How samples are read.

    Attributes:
        detached (`bool`): Whether its session is: samples pass as they come.
        dropped (`int`): Dead groups that were dropped.
        waited (`int`): Groups that were replayed because nothing else was there.
        in_a_row (`int`): Dead groups dropped since the last one that was live.
        next_id (`int`): Of the next replayed group; below 0.
        window (`Counter`): Counters since the last metrics.
        scored (`list`): Of each group since then, its rewards `(G, functions)`.
    """

    def __init__(self, inner: Any, view: TrainerView, components: Components, reading: SampleReader) -> None:
        self.inner = inner
        self.window: Counter[str] = Counter()
        self.scored: list[Floats] = []
        self.dropped = 0
        self.waited = 0
        self.detached = False
        self._view = view
        self.reading = reading
        self._components = components
        self._buffer = components.buffer
        self._clock = components.buffer.clock
        self._config = components.settings.config
        self._dry = self._config.replay_dry_run
        self._line: deque[QueuedSample] = deque()
        self._given: deque[QueuedSample] = deque()
        self._open: dict[int, OpenGroup] = {}
        self._known: dict[int, bool] = {}  # by id: whether the group was dropped
        self.in_a_row = 0
        self.next_id = -1
        self._version = -1
        self._synced_at = 0
        self._arrived_at = 0  # the version at which a sample came last
        self._restored = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _decides(self) -> bool:
        """Tell whether groups are judged."""
        return not self.detached

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
        self._look_at_rule()
        if not self._decides:
            self._let_pass()
        while True:
            given = self._pass_on()
            if given is not None:
                return given
            if self._receive(0.0) or self._close(self.reading.is_whole):
                continue
            may_replay = self._may_replay_waiting()
            if (self._open or may_replay) and self._receive(GAP if self._open else GRACE):
                continue
            if self._close(bool) or (may_replay and self._replay_waiting()):
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
            for sample in _each_once((*self._given, *self._line), self._open.values()).values():
                sample.model_version += version
        if version != self._version:
            self._version = version
            self._synced_at = self._clock.update

    def _look_at_rule(self) -> None:
        """Let stored groups leave that another reward rule scored, with those of their samples that wait here."""
        rule = compat.reward_rule(self._view)
        changes = self._buffer.rule.changes(rule)
        tally = Tally()
        tally.retire(self._buffer.score_by(rule, changes), OTHER_RULE)
        if changes:
            self._line = deque(handed for handed in self._line if not handed.replayed)
            self._count(tally)

    def trained(self) -> None:
        """Forget the samples of an update that is done, and that replayed ones would count in an epoch."""
        for _ in range(min(asynchronous.step_samples(self._view.own), len(self._given))):
            self._given.popleft()
        trained = self._view.trained
        trained.difference_update([number for number in trained if number < 0])

    def end(self) -> None:
        """Forget the samples that the trainer has fetched and will not train on."""
        self._given.clear()

    def _receive(self, timeout: float) -> bool:
        try:
            self._arrive(self.inner.get(timeout=timeout))
        except Empty:
            return False
        return True

    def _arrive(self, sample: Any) -> None:
        self._arrived_at = self._version
        number = int(sample.group_id)
        if not self._decides:
            self._remember(number, dropped=False)
        if number in self._known:  # it passes, unless its group was dropped and it has nothing to train on either
            if not self._known[number] or can_train([sample]):
                self._line.append(QueuedSample(sample))
            return
        group = self._open.get(number)
        if group is None:
            group = self._open[number] = OpenGroup(number, self._buffer.take_serials(1)[0])
        group.rows.append(sample)
        self._line.append(QueuedSample(sample, group.serial, group))
        group.live = group.live or self.reading.are_live(group.rows)
        self._close(lambda rows: rows is not group.rows and self.reading.is_whole(rows))
        first = next(iter(self._open.values()))
        if group.serial - first.serial >= OPEN_GROUPS:
            self._judge(first)

    def clear(self) -> None:
        """Forget replayed samples that wait here; groups whose samples are coming pass, and are not stored."""
        self._let_pass()
        self._line = deque(handed for handed in self._line if not handed.replayed)

    def _let_pass(self) -> None:
        """Decide nothing about groups whose samples are coming: what comes later of them passes, too."""
        self._known |= dict.fromkeys(self._open, False)
        self._open.clear()
        for handed in self._line:
            handed.group = None

    def _remember(self, number: int, dropped: bool) -> None:
        """Note what further samples of a group share; the oldest note is lost where there are too many."""
        self._known[number] = dropped
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def _close(self, complete: Callable[[list[Any]], bool]) -> bool:
        """Judge the groups whose rows are taken for complete. Tell whether there were any."""
        closing = [group for group in self._open.values() if complete(group.rows)]
        for group in closing:
            self._judge(group)
        return bool(closing)

    def _judge(self, group: OpenGroup) -> None:
        """Decide about a complete group: it passes and is stored, or it is dropped and another one takes its place."""
        del self._open[group.id]
        payload = self.reading.payload(group.rows)
        view = self.reading.view(group.rows, self._born(group.rows[0]), payload)
        tally = Tally(groups=1)
        self._components.success.note(view.reward, view.reward_size)
        solved = self._buffer.observe([view], tally)
        tally.failed -= int(view.masked.sum())  # rows that a group lacks
        self.scored.append(view.rewards[0])
        dead = bool(view.dead[0]) and not group.live
        drops = dead and not self._dry and self.in_a_row < DROUGHT
        self.in_a_row = self.in_a_row + 1 if drops else 0
        self._remember(group.id, drops)
        if not dead:
            self._store(group, view, payload, solved, tally)
        elif not (drops or self._dry):
            tally.dead_after = 1
            tally.note(1, PASSED)
        self._count(tally)
        drawn = self._draw(view) if drops or (dead and self._dry) else None
        if drops:
            self.dropped += 1
            self._view.trained.add(group.id)
        self._replace(group, drawn or [] if drops else None)

    def _replace(self, group: OpenGroup, by: list[QueuedSample] | None) -> None:
        """Let a group's samples pass, or put others in their place."""
        line: deque[QueuedSample] = deque()
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

    def _store(self, group: OpenGroup, view: Groups, payload: Any, solved: Ints, tally: Tally) -> None:
        if self._buffer.capacity:
            packed = pack(payload)
            newcomer = Newcomer(group.serial, len(packed.data), HELD, payload=packed)
            self._buffer.extend(view, [newcomer], tally, solved)

    def _born(self, sample: Any) -> int:
        """Updates done when a sample's policy was synced."""
        behind = max(self._version - int(sample.model_version), 0) * int(self._view.args.weight_sync_steps)
        return max(self._synced_at - behind, 0)

    def _draw(self, slot: Groups | None) -> list[QueuedSample] | None:
        """A stored group's samples; None where nothing may be replayed. Of a dry run it is only counted."""
        if not self._buffer.capacity:
            return None
        counters = self._buffer.totals.counters
        tally = Tally()
        most, limit = self._buffer.allowed(int(counters["generated"]))
        try:
            if counters["replaced"] >= most:
                tally.note(1, f"{limit} allows no further group")
                return None
            self._buffer.observe([], tally)  # since the last group, entries may have grown too old
            waiting = [handed.serial for handed in (*self._line, *self._given)]
            held = {UNTRAINED: np.isin(self._buffer.table.serial, waiting)}
            drawn = self._buffer.sample(slot, tally, held=held)
            if drawn is None:
                return None
            row = drawn.rows[drawn.rows != NONE][0]
            self._buffer.count_uses(drawn.eligible[[row]], tally)
            tally.replaced, tally.rows = 1, self._buffer.size
            return self._take(int(drawn.eligible[row]), float(drawn.chances[row]))
        finally:
            self._count(tally)

    def _take(self, entry: int, chance: float) -> list[QueuedSample]:
        """The samples of an entry, weighed."""
        table = self._buffer.table
        serial = int(table.serial[entry])
        group = self._buffer.load(serial)
        age = int(self._clock.update - table.update[entry])
        weight = self._config.replay_weight * self._components.weight_before_the_loss(age, chance)
        samples = samples_of(group, table.row_masked[entry].tolist(), weight)
        self.next_id -= 1
        return [QueuedSample(replace(one, group_id=self.next_id + 1), serial, replayed=True) for one in samples]

    def _may_replay_waiting(self) -> bool:
        """Tell whether a stored group may be handed out because nothing else is there. A replay makes all waiting
        samples staler, so it uses the first half of `max_staleness`."""
        may_wait = self._decides and not self._dry and not self._buffer.policy.draws_same_prompt
        spent = 2 * (self._version - self._arrived_at + 1) > self._view.args.max_staleness
        return may_wait and not spent and not self._line and len(self._buffer) > 0

    def _replay_waiting(self) -> bool:
        """Hand out a stored group, if the worker is well. Tell whether there was one."""
        self._view.rollout_worker.check_health(self._view.args.heartbeat_stale_after_s)
        drawn = self._draw(None)
        self._line.extend(drawn or [])
        self.waited += drawn is not None
        return drawn is not None

    def _pass_on(self) -> Any:
        """Return the first sample that nothing holds up; None if there is none."""
        if not self._line or not (self._line[0].group is None or self._line[0].group.live):
            return None
        handed = self._line.popleft()
        sample = handed.sample
        if handed.replayed:
            sample.model_version = self._version
        staleness = self._version - int(sample.model_version)
        oversize = 0 < (self._view.args.token_budget or 0) < len(sample.input_ids)
        dropped = staleness > self._view.args.max_staleness or oversize  # by the trainer, at once
        if not (dropped or self.detached):
            self._given.append(handed)
        return sample

    def _count(self, tally: Tally) -> None:
        """Add counters to those of the run and to those since the last metrics."""
        counted = {name: getattr(tally, name) for name in COUNTERS}
        self.window.update(counted)
        self._buffer.totals.add(tally, batches=0, of_all_ranks=counted)

    @contextmanager
    def counted_as_trained(self) -> Iterator[None]:
        """While a checkpoint is written: groups that it holds need not be generated again on resuming, and those must
        be of which samples are still to come, also where the trainer has begun to train on them."""
        trained = self._view.trained
        before = set(trained)
        trained.update(
            number for handed in (*self._given, *self._line) if (number := int(handed.sample.group_id)) >= 0
        )
        if asynchronous.restarts_worker(self._view):
            trained.difference_update(self._open)
        try:
            yield
        finally:
            trained.clear()
            trained.update(before)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: samples that are not trained on yet, and where counting stands."""
        restarts = asynchronous.restarts_worker(self._view)  # and generates incomplete groups again
        groups = [] if restarts else list(self._open.values())
        again = self._open.values() if restarts else ()
        handed = [one for one in (*self._given, *self._line) if one.group not in again]
        samples = _each_once(handed, groups)
        place = {key: number for number, key in enumerate(samples)}
        return {
            "handed": [
                [place[id(one.sample)], one.serial, one.group and one.group.id, one.replayed] for one in handed
            ],
            "open": [[group.id, group.serial, group.live, [place[id(row)] for row in group.rows]] for group in groups],
            "samples": [encoded(sample, self._version) for sample in samples.values()],
            "known": [] if restarts else list(self._known.items()),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "since_sync": self._clock.update - self._synced_at,
            "since_arrival": self._version - self._arrived_at,
            "window": {name: float(count) for name, count in self.window.items()},
            "scored": [rewards.tolist() for rewards in self.scored],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave: samples that the trainer had fetched come first again."""
        samples = [decoded(one) for one in state["samples"]]
        self._open = {
            number: OpenGroup(number, serial, [samples[row] for row in rows], live)
            for number, serial, live, rows in state["open"]
        }
        self._line = deque(
            QueuedSample(samples[row], serial, self._open.get(number), replayed)
            for row, serial, number, replayed in state["handed"]
        )
        self._given.clear()
        self._known = dict(state["known"])
        vars(self).update(state["counts"])
        self._synced_at = self._clock.update - state["since_sync"]
        self._arrived_at = -state["since_arrival"]
        self.window = Counter(state["window"])
        self.scored = [np.array(rewards) for rewards in state["scored"]]
        self._restored = True
        if asynchronous.restarts_worker(self._view):  # which counts from 0 again
            self._renumber()

    def _renumber(self) -> None:
        numbers: dict[int, int] = {}
        for handed in self._line:
            number = int(handed.sample.group_id)
            if number >= 0 and number not in numbers:
                numbers[number], self.next_id = self.next_id, self.next_id - 1
            handed.sample.group_id = numbers.get(number, number)


def _each_once(handed: Iterable[QueuedSample], groups: Iterable[OpenGroup]) -> dict[int, Any]:
    """All of these samples, by `id`."""
    samples = {id(one.sample): one.sample for one in handed}
    return samples | {id(row): row for group in groups for row in group.rows}
