"""Between this machine and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35_convert.commands.options import Json, OutputFormat, Quiet
from qwen35_convert.output import Output


def download(
    repo: Annotated[str, typer.Argument(help="owner/name on the hub.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    quiet: Quiet = False,
) -> None:
    """Download what a conversion needs, checked by hash.

    Example: qwen35 download Qwen/Qwen3.5-0.8B -o Qwen3.5-0.8B
    """
    from qwen35_convert import api

    fetched = api.download(repo, out, revision=revision, progress=not quiet)
    print(f"{fetched.path}: {len(fetched.files)} files of {fetched.repo}@{fetched.revision}")


def upload(
    artifact: Annotated[str, typer.Argument(help="Folder or .gguf file, with its receipt.")],
    repo: Annotated[str, typer.Argument(help="owner/name on the hub, created if missing.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files without using the network.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as private.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
) -> None:
    """Publish an artifact on the hub, with its receipt and a card.

    Example: qwen35 upload ./Qwen3.5-9B-FP8 me/Qwen3.5-9B-FP8 --dry-run
    """
    from qwen35_convert import api

    output = Output.of("upload", output_format, None, json=json)
    output.upload(api.upload(artifact, repo, private=private, dry_run=dry_run))
