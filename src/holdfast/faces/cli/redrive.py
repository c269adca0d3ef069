"""`holdfast capture` and `redrive`: letters into custody, and what was planned, exactly; and `groups`, `token`,
`ledger` and `balance`. Ctrl-C pauses a redrive cleanly."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from holdfast.core.ledger import is_anchor
from holdfast.core.plan import RedriveState, RedriveTask
from holdfast.core.requests import vault as requests
from holdfast.errors import HoldfastError
from holdfast.faces.cli.command import LIST_COUNT_DEFAULT, CommandOption, asks, command
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode
from holdfast.faces.cli.output import Output, plural, table
from holdfast.faces.cli.progress import meter

if TYPE_CHECKING:
    from holdfast.faces.client import RequestClient


STEP_S = 0.2
#: For so long a running task may be in nobody's hands: one that has just begun, or goes from one process to another.
ORPHAN_S = 3.0
STEPS_MAX = 5 * 86_400 * 7

LIMIT = CommandOption(default=LIST_COUNT_DEFAULT)


@command(
    "capture",
    requests.StartCapture,
    example="orders.dlq\norders.dlq --continuous",
    queue=CommandOption(metavar="QUEUE"),
)
async def capture(context: CommandContext, asked: requests.StartCapture) -> ExitCode:
    """Take the letters of a dead-letter queue into custody: stored first, acked second."""
    async with context.connect(requests.StartCapture) as custody:
        try:
            done = await custody.call(asked)
        except HoldfastError as error:
            # A queue that is unknown may be one of a broker that nobody told us of.
            if not context.is_far and context.settings.broker is None and error.message.startswith("queue is unknown"):
                error.message += (
                    "; no broker is configured: for a queue of RabbitMQ set HOLDFAST_BROKER_URL to "
                    "amqp://user:password@host/vhost, or broker in holdfast.toml"
                )
            raise
    context.out.document(done)
    text = f"{plural(done.captured, 'letter')} of '{asked.queue}' captured"
    if done.matched:
        text += f", {plural(done.matched, 'letter')} recognised"
    if done.failed_imports:
        text += f", {plural(done.failed_imports, 'message')} could not become letters"
    context.out.say(text)
    return ExitCode.PARTLY_DONE if done.failed_imports or done.not_acked else ExitCode.DONE


# --- redrive --------------------------------------------------------------------------------------------------


@command(
    "redrive start",
    requests.StartRedrive,
    example="5d4d242a… --reason 'fixed in 1.4'",
    plan=CommandOption(name="plan_hash", metavar="PLAN"),
)
async def start(context: CommandContext, asked: requests.StartRedrive) -> ExitCode:
    """Execute a plan and watch it; Ctrl-C pauses the task and leaves it to be resumed."""
    async with context.connect(requests.StartRedrive) as custody:
        return await _watched(context, custody, await custody.call(asked))


@command("redrive resume", requests.ResumeRedrive, example="7")
async def resume(context: CommandContext, asked: requests.ResumeRedrive) -> ExitCode:
    """Go on with a task that was paused or stopped, or whose process is gone, and watch it."""
    async with context.connect(requests.ResumeRedrive) as custody:
        task = await custody.call(asked)
        if task.unknown:
            context.out.say(
                f"{plural(task.unknown, 'letter')} may be on the way already; sent again when the lease of the "
                "process before has run out, within 2 minutes"
            )
        return await _watched(context, custody, task)


@command("redrive watch", requests.ReadRedrive, example="7")
async def watch(context: CommandContext, asked: requests.ReadRedrive) -> ExitCode:
    """Watch a task of a server until it ends."""
    async with context.connect(requests.ReadRedrive) as custody:
        return await _watched(context, custody, await custody.call(asked), pauses=False)


@asks("redrive pause", requests.PauseRedrive, example="7")
def pause(out: Output, asked: requests.PauseRedrive, task: RedriveTask) -> None:
    """Pause a task, after the letters that are in flight."""
    _told(out, task)


@asks("redrive cancel", requests.CancelRedrive, example="7")
def cancel(out: Output, asked: requests.CancelRedrive, task: RedriveTask) -> None:
    """End a task for good; what was not redriven is captured, also what may have been: its history says so."""
    _told(out, task)


UNDER_WAY = CommandOption(
    kind=bool,
    default=False,
    help="Only tasks that go on or can.",
    read=lambda given, option: given or None,  # without it all of them
)


@asks("redrive list", requests.ListRedrives, lines="redrives", limit=LIMIT, under_way=UNDER_WAY)
def list_redrives(out: Output, asked: requests.ListRedrives, page: requests.RedrivesReply) -> None:
    """List tasks, newest first."""
    rows = [
        (one.id, one.state.value, one.total, one.redriven, one.possible_duplicates, one.failed, one.skipped,
         one.came_back, one.name, one.started_by, one.why)
        for one in page.redrives
    ]  # fmt: skip
    columns = ("#id", "state", "#letters", "#redriven", "#twice?", "#failed", "#skipped", "#back", "name", "who", "why")
    out.show(table(columns, rows))


async def _watched(
    context: CommandContext, custody: RequestClient, task: RedriveTask, *, pauses: bool = True
) -> ExitCode:
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    try:
        with meter(f"redrive {task.id}", total=task.total, quiet=context.as_json) as bar:
            done, held_at_s = 0, loop.time()
            for _ in range(STEPS_MAX):
                now = task.redriven + task.failed + task.skipped
                bar.add(now - done)
                bar.advance(now - done)
                done = now
                held_at_s = loop.time() if task.held_by else held_at_s
                if task.state is not RedriveState.RUNNING or loop.time() - held_at_s > ORPHAN_S:
                    break
                try:
                    await asyncio.wait_for(interrupted.wait(), STEP_S)
                    if not pauses:
                        break
                    task = await custody.call(requests.PauseRedrive(id=task.id))
                except TimeoutError:
                    task = await custody.call(requests.ReadRedrive(id=task.id))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    context.out.document(task)
    _told(context.out, task)
    if task.state is RedriveState.DONE and not task.failed and not task.skipped:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if task.redriven else ExitCode.FAILED


def _told(out: Output, task: RedriveTask) -> None:
    text = f"redrive {task.id} is {task.state.value}: {task.redriven} of {task.total} redriven"
    if task.failed or task.skipped:
        text += f", {task.failed} failed, {task.skipped} skipped"
    if task.possible_duplicates:
        text += f", {task.possible_duplicates} of them maybe twice"
    if task.why and task.why != f"redrive {task.id}":
        text += f"; {task.why}"
    out.say(text)
    if task.state is RedriveState.CANCELLED and task.unknown:
        out.say(
            f"{plural(task.unknown, 'letter')} may have been published; captured again now, or within 3 minutes: "
            "redriven once more, they may be there twice"
        )
    is_orphan = task.state is RedriveState.RUNNING and not task.held_by
    if is_orphan:
        out.say("nobody seems to run it: its process is gone")
    if is_orphan or task.state in (RedriveState.PAUSED, RedriveState.STOPPED):
        out.say(f"go on with: holdfast redrive resume {task.id}")


# --- groups, tokens, ledger and balance -----------------------------------------------------------------------


@asks("groups list", requests.ListGroups, example="--status open", lines="groups", limit=LIMIT)
def list_groups(out: Output, asked: requests.ListGroups, page: requests.GroupsReply) -> None:
    """List failure groups; the one that got a letter last comes first."""
    rows = [(one.key, one.title, one.count, one.status.value, one.last_at, one.sample, one.note) for one in page.groups]
    out.show(table(("key", "title", "#letters", "status", "last", "#sample", "note"), rows))


@asks(
    "groups change",
    requests.ChangeGroup,
    example="3f2a9c0d1e4b5a68 --status resolved --note 'fixed in 1.4'",
)
def change_group(out: Output, asked: requests.ChangeGroup, changed: requests.GroupView) -> None:
    """Resolve, ignore or reopen a group. One that is resolved and gets another letter is regressed."""
    out.say(f"group {changed.key} is {changed.status.value}")


@asks(
    "token create",
    requests.CreateToken,
    example="ci --role operator --expires-in 720h --queue 'orders.*'",
    name=CommandOption(metavar="NAME"),
    role=CommandOption(default="viewer"),
    queues=CommandOption(name="queue", default=None),
)
def create_token(out: Output, asked: requests.CreateToken, made: requests.TokenReply) -> None:
    """Make an API token. It is shown this once; only its hash is kept."""
    out.say(made.token)


@asks("token list", requests.ListTokens, lines="")
def list_tokens(out: Output, asked: requests.ListTokens, found: Sequence[requests.TokenView]) -> None:
    """List API tokens, without the tokens themselves."""
    names = ("name", "role", "queues", "made_at", "made_by", "expires_at", "revoked_at")
    rows = [[", ".join(one.queues) if name == "queues" else getattr(one, name) for name in names] for one in found]
    out.show(table(names, rows))


@asks("token revoke", requests.RevokeToken, example="ci")
def revoke_token(out: Output, asked: requests.RevokeToken, done: requests.ActionReply) -> None:
    """Revoke an API token, at once."""
    out.say(f"token '{asked.name}' is revoked")


@asks("ledger show", requests.ReadLedger, example="--limit 100", limit=LIMIT, cursor=CommandOption())
def show_ledger(out: Output, asked: requests.ReadLedger, page: requests.LedgerReply) -> None:
    """Show who did what to which letters, oldest first."""
    names = ("number", "at", "actor", "action", "outcome", "queue", "to_state", "count", "reason")
    rows = [[getattr(row, name) for name in names] for row in page.rows]
    columns = ("#row", "at", "who", "what", "outcome", "queue", "state", "#letters", "why")
    out.show(table(columns, rows))
    if page.next:
        out.note(f"more with --cursor {page.next}")


@command("ledger export", requests.ExportLedger, example="--action letters.discard > ledger.csv")
async def export_ledger(context: CommandContext, asked: requests.ExportLedger) -> None:
    """Write the ledger as CSV for a spreadsheet, in which no text is run as a formula."""
    async with context.connect(requests.ExportLedger) as custody:
        table = await custody.call(asked)
        async with aclosing(table):
            async for lines in table:
                sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


@asks("ledger head", requests.ReadHead, example=">> somewhere-else.txt")
def head(out: Output, asked: requests.ReadHead, found: requests.HeadReply) -> None:
    """Print the anchor of the chain. Kept elsewhere, it makes a tail that was cut off visible."""
    out.say(found.head)


def _anchor(text: str, *, option: str) -> str:
    if text and not is_anchor(text):
        raise BadUsage(f"{option} is invalid; it is not what 'holdfast ledger head' prints, NUMBER:HASH")
    return text


@asks("ledger verify", requests.VerifyLedger, example="--anchor 1234:9f3c…", anchor=CommandOption(read=_anchor))
def verify(out: Output, asked: requests.VerifyLedger, found: requests.Verified) -> ExitCode:
    """Walk the whole chain and all that it vouches for; exit code 1 names the rows and letters that were changed,
    removed or inserted."""
    for one in found.broken:
        out.say(f"broken: {one.why}")
    for text in found.unknown:
        out.note(f"not known: {text}")
    if not found.broken:
        out.say(f"{plural(found.rows, 'row')} and {plural(found.letters, 'letter')}, the chain holds")
    return ExitCode.FAILED if found.broken else ExitCode.DONE


@asks("balance", requests.ReadBalance, example="|| echo 'the ledger and the vault differ'")
def balance(out: Output, asked: requests.ReadBalance, found: Sequence[requests.BalanceRow]) -> ExitCode:
    """Count letters by queue and state, from the ledger and from the vault; exit code 1 when they differ."""
    rows: list[list[object]] = []
    for row in found:
        rows += [
            [row.queue, state, row.ledger.get(state, 0), row.vault.get(state, 0)]
            for state in sorted({*row.ledger, *row.vault})
        ]
        rows.append([row.queue, "captured ever", row.captured_ever, sum(row.vault.values())])
    out.show(table(("queue", "state", "#ledger", "#vault"), rows))
    agrees = all(row.agrees for row in found)
    out.say("they agree" if agrees else "they differ")
    return ExitCode.DONE if agrees else ExitCode.FAILED
