"""mkdocs hook: make links that are written for GitHub work in the site.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages too. Other files outside docs/ that a page
links to (configurations, measurements) are copied into the site. A link to a missing file is left
unchanged, and `--strict` reports it.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

REPOSITORY = Path(__file__).parent.parent
OUTSIDE = {
    "readme.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Page of the site -> its file, for files outside docs/."""
WORKER = "javascripts/search_from_disk.js"
LINK = re.compile(r'(?P<before>\]\(|\b(?:src|href)=")(?P<path>[\w./-]+)')


def source(page: str) -> str:
    """Return the file of a page, relative to the root of the repository."""
    return OUTSIDE.get(page, f"docs/{page}")


def in_site(file: str) -> str:
    """Return the path in the site of a file of the repository."""
    return next((page for page in OUTSIDE if OUTSIDE[page] == file), file.removeprefix("docs/"))


def target(page: str, path: str) -> str:
    return normpath(f"{source(page)}/../{path}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, file in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / file)))
    for page in [file.src_uri for file in files.documentation_pages()]:
        for link in LINK.finditer((REPOSITORY / source(page)).read_text(encoding="utf-8")):
            file = target(page, link["path"])
            if (REPOSITORY / file).is_file() and in_site(file) not in files.src_uris:
                files.append(
                    File.generated(config, in_site(file), abs_src_path=str(REPOSITORY / file))
                )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def relative(link: re.Match[str]) -> str:
        file = target(page.file.src_uri, link["path"])
        if not (REPOSITORY / file).is_file():
            return link["before"] + link["path"]
        return link["before"] + relpath(in_site(file), dirname(page.file.src_uri) or ".")

    return LINK.sub(relative, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the theme's stand-in for workers from the site, where the theme would load one from the
    network."""
    return output.replace(
        "https://unpkg.com/iframe-worker/shim", get_relative_url(WORKER, page.url)
    )


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", f"/{WORKER}")
