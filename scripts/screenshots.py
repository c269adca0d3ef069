"""Pictures of every page of the console, on the data of `holdfast demo`: light and dark, wide and narrow.

`python -m scripts.screenshots docs/images` writes PAGE-WIDTH-SCHEME.png; `--only letters overview` some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import tempfile
from pathlib import Path
from typing import Literal

from tests.faces.web.every_page import Demo, every_page, serving_demo
from tests.support.browser import NARROW, WIDE, Chromium, open_chromium

WIDTHS = {"wide": WIDE, "narrow": NARROW}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def name_of(path: str) -> str:
    """What the picture of a page is called: the words of its path."""
    return "-".join(re.findall(r"\w+", re.sub(r"{(\w+)(:\w+)?}", r"\1", path))) or "overview"


async def take(folder: Path, only: list[str]) -> list[Path]:
    """Take them; returns what was written."""
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as place:
        async with serving_demo(Path(place)) as demo, open_chromium() as chromium:
            pages = {name_of(path): address for path, address in (await every_page(demo)).items()}
            for width, scheme in itertools.product(WIDTHS, SCHEMES):
                made += await _look(chromium, demo, folder, pages, only, width, scheme)
    return made


async def _look(
    chromium: Chromium,
    demo: Demo,
    folder: Path,
    pages: dict[str, str],
    only: list[str],
    width: str,
    scheme: Literal["light", "dark"],
) -> list[Path]:
    made = []
    async with chromium.visitor(demo.address, width=WIDTHS[width], scheme=scheme) as visitor:
        await visitor.open("/sign-in")
        visitor.expects("style")  # playwright sets its own while it takes a picture
        await visitor.page.screenshot(path=folder / f"sign-in-{width}-{scheme}.png")
        await visitor.page.get_by_label("Token").fill(demo.token)
        await visitor.page.get_by_role("button", name="Sign in").click()
        await visitor.sees("Sign out")
        for name, address in pages.items():
            if name != "sign-in" and (not only or name in only):
                await visitor.open(address)
                made.append(folder / f"{name}-{width}-{scheme}.png")
                await visitor.page.screenshot(path=made[-1])
    return made


def main() -> None:
    """Read the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for path in asyncio.run(take(given.folder, given.only)):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
