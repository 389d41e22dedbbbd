"""The commands about tokens, on the daemon's own host: no network carries a token before it is known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.catalogue import ConfigError, StorageError
from twin.cli.arguments import present
from twin.cli.grammar import CONFIG, Verb

if TYPE_CHECKING:
    from rich.console import Console

DAY_S = 86_400.0
WHERE = f"""
    {CONFIG}
    --tokens-file FILE  file of token hashes, instead of that of the configuration
"""
NAME = "NAME  owner of the token; the journal records this name as the author"


def _file(args: argparse.Namespace) -> Path:
    """The file of token hashes. Raises ConfigError."""
    from twin.api import tokens
    from twin.config import find_config, load_config

    if args.tokens_file is not None:
        return Path(args.tokens_file)
    loaded = load_config(find_config(args.config))
    given = loaded.config.api.tokens_file if loaded.config.api is not None else None
    return loaded.state / tokens.LOCAL_FILES[0] if given is None else loaded.file(given)


def run_list(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Print the tokens by name; never a hash."""
    from twin.api import tokens
    from twin.report import grid, safe_text

    path = _file(args)
    if not path.exists():
        raise ConfigError(f"{path}: is not there; `racktwin token add NAME` makes it")
    for warning in tokens.check_mode(path):
        err.print(safe_text(f"warning {warning}", "yellow"))
    heads = ("name", "role", "created", "expires", "halls")
    rows = [{head: getattr(token, head) for head in heads} for token in tokens.read_tokens(path)]
    for row in rows:
        row["halls"] = ", ".join(row["halls"])

    def show(tree: dict[str, Any], out: Console) -> None:
        grid(out, heads, [list(row.values()) for row in tree["tokens"]], "no tokens")

    return present(args, {"tokens": rows}, show, out)


def run_add(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Make a token; its text goes to standard output, or into a file that only its owner reads."""
    from twin.api import tokens

    path = _file(args)
    days = None if args.expires_s is None else args.expires_s / DAY_S
    if args.out is not None and args.out.exists():
        try:
            tokens.read_secret(args.out)
        except ConfigError:
            raise ConfigError(
                f"--out {args.out}: exists and holds no token; expected a new file, or that of a token"
            ) from None
    secret = tokens.add_token(path, args.name, args.role, days, halls=tuple(args.hall))
    result: dict[str, Any] = {"name": args.name, "role": args.role, "file": str(path)}
    if args.hall:
        result["halls"] = args.hall
    if args.out is not None:
        try:
            tokens.write_private(args.out, secret + "\n")
        except OSError as error:  # nobody knows its text
            tokens.revoke_token(path, args.name)
            raise StorageError(f"{args.out}: cannot be written: {error.strerror}") from error
        result["output"] = str(args.out)
    else:
        result["token"] = secret

    def show(tree: dict[str, Any], out: Console) -> None:
        if "token" in tree:
            out.file.write(tree["token"] + "\n")
        _written(path, err)

    return present(args, result, show, out)


def run_link(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Print the address of the page with the token of the administrator that the daemon made."""
    from twin.api import login_link
    from twin.config import find_config, load_config

    loaded = load_config(find_config(args.config))
    link = login_link(loaded)
    present(args, {"link": link}, lambda t, o: o.print(t["link"], markup=False, soft_wrap=True), out)
    if "#" in link:
        err.print("it holds a token of an administrator: keep it to yourself", markup=False)
    else:
        err.print("the page asks for a token; `racktwin token add NAME` makes one", markup=False)
    return 0


def run_revoke(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Take a token out of the file."""
    from twin.api import tokens

    path = _file(args)
    tokens.revoke_token(path, args.name)
    return present(args, {"revoked": args.name, "file": str(path)}, lambda *_: _written(path, err), out)


def _written(path: Path, err: Console) -> None:
    text = f"{path}: written; a running daemon takes it up at `racktwin daemon reload` or SIGHUP"
    err.print(text, markup=False, soft_wrap=True)


VERBS = {
    "token list": Verb(run_list, WHERE, ("", "--config /etc/racktwin/racktwin.yaml"), rows="tokens"),
    "token link": Verb(run_link, CONFIG, ("", "--config site/racktwin.yaml")),
    "token revoke": Verb(run_revoke, NAME + WHERE, ("alice",)),
    "token add": Verb(
        run_add,
        f"""
        {NAME}
        {WHERE}
        --role job|viewer|operator|admin=viewer  role of the token
        --hall HALL*  limit the token to this hall of a fleet; repeatable; default: all halls
        --expires DURATION  lifetime of the token, such as 90d; default: unlimited
        ~--expires-days DAYS>expires_s
        -o --out FILE  write the token to this file, with mode 0600
        ~--output FILE>out
        """,
        ("alice --role operator --expires 90d", "grafana --out grafana.token"),
    ),
}
