"""For mkdocs: files of the repository outside docs/ are not on the site, so links to them become their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def on_the_site(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        return link[0] if ":" in link["path"] or target.is_relative_to(docs) else link["text"]

    return re.sub(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#]+)[^)\s]*\)", on_the_site, markdown)
