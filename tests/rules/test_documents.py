"""The documents say what is true: examples run, diagrams are drawn from the tables, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from holdfast.core.requests.queue import VERBS
from holdfast.core.states import ITEM_MOVES, LETTER_MOVES, RECOVERY_MOVES, ItemState, RunState, mermaid
from tests.rules.tree import DOCUMENTS, SOURCE, drawn

ROOT = Path(__file__).parents[2]


def _blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def test_the_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "quick_start.py"
    script.write_text(_blocks("README.md", "python")[0])
    command = [sys.executable, str(script)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"b'(\w+)'", done.stdout) == ["one", "two"]


def test_the_first_example_of_consumers_sends_and_handles(tmp_path: Path) -> None:
    script = tmp_path / "orders.py"
    example = _blocks("docs/consumers.md", "python")[0]
    script.write_text(example.replace("    ...  #", "    print(message.body)\n    app.stop()  #"))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "b'{\"id\":1}'\n"), done.stderr


def test_the_diagram_of_the_readme_is_drawn_from_the_table() -> None:
    assert _blocks("README.md", "mermaid") == [mermaid(ITEM_MOVES) + "\n"]


def test_every_state_can_be_reached_and_left() -> None:
    for state in ItemState:
        assert any(source is state for source, _ in ITEM_MOVES), state
        assert any(target is state for _, target in ITEM_MOVES), state


def test_the_diagram_of_custody_is_drawn_from_the_table() -> None:
    assert _blocks("docs/custody.md", "mermaid") == [mermaid(LETTER_MOVES) + "\n"]


def test_the_diagram_of_recovery_is_drawn_from_the_table() -> None:
    assert _blocks("docs/recovery.md", "mermaid") == [mermaid(RECOVERY_MOVES) + "\n"]


def test_every_state_of_a_run_can_be_reached() -> None:
    assert {target for _, target in RECOVERY_MOVES} == set(RunState) - {RunState.OUTSIDE}


def test_every_verb_is_described() -> None:
    described = (ROOT / "docs/queue.md").read_text()
    for verb in VERBS:
        assert f"`{verb}`" in described, verb


def test_the_two_commands_stand_at_the_top_of_the_readme() -> None:
    first = _blocks("README.md", "sh")[0]
    commands = [line.split("#")[0].strip() for line in first.splitlines()]
    assert commands == ["make run", "make test"]
    goals = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {command.split()[1] for command in commands} <= set(goals)


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_the_tree_and_the_layers_are_drawn_from_the_code() -> None:
    for document in DOCUMENTS:
        assert document.read_text() == drawn(document.read_text()), "python -m tests.rules.tree draws them anew"


def test_the_ways_of_a_message_go_through_modules_that_there_are() -> None:
    (six,) = [text.split("\n## ")[0] for text in (ROOT / "CONTRIBUTING.md").read_text().split("## Six ways")[1:]]
    named = re.findall(r'\["([a-z_/]+)"\]', six)
    assert six.count("```mermaid") == 6
    assert [name for name in named if not (SOURCE / f"{name}.py").exists()] == []
