"""Letters on their way out: at the pace that was asked for, into the backup first, and to exchanges that take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.core.recovery import RunLimits, Summary
from holdfast.ports.recovery import Backup, DeadLetters, RunLetter
from holdfast.proof import crash_point
from holdfast.services.recover.books import LetterTable
from holdfast.services.recover.keeping import PUBLISH_SPARE_S, Keeper
from holdfast.services.recover.settling import Settler
from holdfast.services.recover.watch import RunClock

#: Exchanges that letters name are asked for until there are so many.
EXCHANGES_COUNT_MAX = 1_000


class Sender:
    """`add` letters that may go, then `send` whenever the run comes by: nothing here waits for a pace."""

    def __init__(
        self,
        letters: DeadLetters,
        books: LetterTable,
        summary: Summary,
        keeper: Keeper,
        settler: Settler,
        watch: RunClock,
        limits: RunLimits,
        backup: Backup | None,
    ) -> None:
        self.waiting: deque[RunLetter] = deque()  #: in hand, not sent yet
        self._letters = letters
        self._books = books
        self._summary = summary
        self._keeper = keeper
        self._settler = settler
        self._watch = watch
        self._limits = limits
        self._backup = backup
        self._exchanges: set[str] = set()

    async def add(self, letters: Sequence[RunLetter]) -> None:
        """They go next. Raises BrokerError, with all of them waiting.

        An exchange is asked for before the first publish to it: one that is refused ends the channel, and with it what
        is known of all others.
        """
        self.waiting += letters
        names = {letter.route.address.exchange for letter in letters if letter.route.address is not None}
        for name in names - self._exchanges:
            if len(self._exchanges) >= EXCHANGES_COUNT_MAX:
                return
            why = await self._letters.refusal(name)
            self._exchanges.add(name)
            if why:
                self._settler.refused[name] = why
                self._keep_those_for(name, why)

    async def send(self) -> bool:
        """What may go now; False when there is no backup of it: then nothing more may be published."""
        while count := self._watch.due_count(len(self.waiting)):
            letters = [self.waiting[place] for place in range(count)] if count < len(self.waiting) else [*self.waiting]
            if self._backup is not None and not await self._save(self._backup, letters):
                return False
            self._settler.sending(letters)
            crash_point("recover.before_publish")
            for _ in letters:
                self.waiting.popleft()
            self._books.fly(letters)
            # Longer than the run itself: its own clocks decide when it is over.
            timeout_s = self._watch.left_s() + self._limits.stop_timeout_s + PUBLISH_SPARE_S
            self._letters.send(letters, self._settler.on_outcome, timeout_s=timeout_s)
            crash_point("recover.after_publish")
        return True

    def lose(self) -> None:
        """The connection is gone: they will be delivered again."""
        for letter in self.waiting:
            self._books.miss(letter)
        self.waiting.clear()

    async def _save(self, backup: Backup, letters: Sequence[RunLetter]) -> bool:
        try:
            await backup.write([self._letters.export(letter) for letter in letters])
        except OSError as error:
            why = error.strerror or str(error)
            self._summary.failure = f"the backup cannot be written, so nothing more was published; {why}"
            return False
        return True

    def _keep_those_for(self, exchange: str, why: str) -> None:
        still, self.waiting = self.waiting, deque()
        for letter in still:
            if letter.address is not None and letter.address.exchange == exchange:
                self._keeper.failed(letter, why)
            else:
                self.waiting.append(letter)
