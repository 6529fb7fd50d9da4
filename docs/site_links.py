"""For mkdocs: what the pages of docs/ are changed in for the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ONE_PROGRAM = "*The Python blocks of this page are one program: each may use names of those before it.*\n\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links out of docs/ as their text, and a note where a copied block may need another."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def on_the_site(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        return link[0] if ":" in link["path"] or target.is_relative_to(docs) else link["text"]

    markdown = re.sub(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#]+)[^)\s]*\)", on_the_site, markdown)
    blocks = [block.start() for block in re.finditer(r"^```python$", markdown, re.MULTILINE)]
    return markdown[: blocks[0]] + ONE_PROGRAM + markdown[blocks[0] :] if len(blocks) > 1 else markdown
