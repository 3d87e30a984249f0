"""Files: those that come from outside, read with limits, and those written, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from jq.errors import ConfigError, DataError, Error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PathLike = str | os.PathLike[str]
Form = Literal["JSON", "TOML"]

_STALE = 3600  # seconds after which a draft is one of a killed run
_DEEPEST = 64  # levels of a document
_LONGEST_NUMBER = 1000  # bits of a whole number: one of more is no float64
_DOCUMENT = 256 << 20  # bytes: reports of devices hold tensors
_SETTINGS = 4 << 20  # bytes of TOML, whose parser takes a hundred times as many


# --- Reading: any file from outside may be a pipe, a device, too large, damaged or hostile ---


def content(path: PathLike, *, error: type[Error] = DataError, kind: str = "", largest: int | None = None) -> bytes:
    """Return the bytes of a regular file; anything else is an error, before it is read.

    >>> content("/dev/zero")
    Traceback (most recent call last):
    jq.errors.DataError: cannot read /dev/zero: not a regular file
    """
    with reading(path, error, kind), open(path, "rb", opener=_unwaiting) as file:
        _check_status(path, os.fstat(file.fileno()), largest)
        held = cast("bytes | None", file.read())
        if held is None:  # as /proc/kmsg, which is no pipe, and waits
            raise ValueError("it is empty so far")
        return held


def _unwaiting(path: str, flags: int) -> int:
    """Open without waiting for a writer: a pipe may take the place of a file that was looked at before."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def text(path: PathLike, *, error: type[Error] = DataError, kind: str = "", largest: int = _DOCUMENT) -> str:
    """Return the text of a regular file in UTF-8, or in UTF-16 where its first bytes say so, as shells of Windows write."""
    raw = content(path, error=error, kind=kind, largest=largest)
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"cannot read {kind}{path}: it is not text ({cause.reason} at byte {cause.start})") from None


def document(path: PathLike, *, error: type[Error] = DataError, kind: str = "", form: Form | None = None) -> Any:
    """Return what a JSON or TOML file holds; by its name, all but .json are TOML.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/deep.json", 1000 * "[" + 1000 * "]")
    ...     try:
    ...         document(f"{folder}/deep.json")
    ...     except DataError as found:
    ...         str(found).partition(" is ")[2]
    'not JSON, or was cut off: it nests too deep, more than 64 levels'
    """
    form = form or ("JSON" if os.fspath(path).endswith(".json") else "TOML")
    source = text(path, error=error, kind=kind, largest=_DOCUMENT if form == "JSON" else _SETTINGS)
    try:
        return parsed(source, form)
    except ValueError as cause:
        raise error(f"{kind}{path} is not {form}, or was cut off: {cause}") from None


def parsed(source: str, form: Form = "JSON") -> Any:
    """Return the document that a text is; a ValueError if it is none, nests too deep, or holds text without an encoding.

    >>> parsed('{"a": [1]}')
    {'a': [1]}
    """
    try:
        made = json.loads(source) if form == "JSON" else _toml(source)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_document(made)
    return made


_TOO_DEEP = f"it nests too deep, more than {_DEEPEST} levels"
_QUOTED = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)
_DOTTED = re.compile(rf"(?:[\w \t-]*\.){{{_DEEPEST}}}")


def _toml(source: str) -> Any:
    """A TOML document; the parser takes memory with the square of the parts of a dotted key."""
    if _DOTTED.search(_QUOTED.sub("_", source)):
        raise ValueError(_TOO_DEEP)
    return tomllib.loads(source)


def _check_document(made: Any) -> None:
    """Raise a ValueError for a document that nests too deep, or holds text without an encoding or a number beyond all."""
    level: list[Any] = [made]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
                raise ValueError(f"it holds a whole number of {value.bit_length()} bits")
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        level = below
    if level:
        raise ValueError(_TOO_DEEP)


@contextlib.contextmanager
def reading(path: PathLike, error: type[Error] = DataError, kind: str = "") -> Iterator[None]:
    """Check that what is there is a regular file, and make an error that names it of what the operating system says.

    >>> with reading("no_such.npy", kind="the array "):
    ...     open("no_such.npy")
    Traceback (most recent call last):
    jq.errors.DataError: cannot read the array no_such.npy: No such file or directory
    """
    try:
        check_regular(path)
        yield
    except (OSError, ValueError) as cause:  # a null byte in the name is a ValueError
        raise error(f"cannot read {kind}{path}: {getattr(cause, 'strerror', None) or cause}") from cause


def check_regular(path: PathLike) -> None:
    """Raise an OSError or a ValueError for what is there and no regular file: of a pipe, reading would wait for ever."""
    with contextlib.suppress(FileNotFoundError):
        _check_status(path, os.stat(path), None)


def _check_status(path: PathLike, status: os.stat_result, largest: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(0, "Is a directory", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if largest is not None and status.st_size > largest:
        raise ValueError(f"it has {status.st_size / 1e6:.0f} MB; expected at most {largest / 1e6:.0f} MB")


# --- Writing: whole or not at all, each writer by a draft of its own ---


def write(path: PathLike, content: bytes | str) -> None:
    """Write a file atomically, creating its folder: the old content stays until all of the new is on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/new/note.txt", "words")
    ...     Path(f"{folder}/new/note.txt").read_text()
    'words'
    """
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(target)
        try:
            with open(draft, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            replace(draft, target)
        finally:  # an interrupt, too, leaves no draft
            draft.unlink(missing_ok=True)


def draft_of(target: Path) -> Path:
    """Return a new name beside a file or folder, and remove what killed runs left there under such names."""
    beginning, end = f".{target.name[:100]}.", ".draft"
    for old in target.parent.iterdir():
        if old.name.startswith(beginning) and old.name.endswith(end):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _STALE:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
    return target.with_name(f"{beginning}{secrets.token_hex(4)}{end}")


@contextlib.contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside a file or folder, for the drafts of what is written there; it is removed in the end.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with draft_folder(Path(parent, "model.onnx")) as folder:
    ...         folder.name.startswith(".model.onnx.")
    ...     os.listdir(parent)
    True
    []
    """
    draft = draft_of(target)
    draft.mkdir()
    try:
        yield draft
    finally:  # an interrupt, too, leaves no draft
        shutil.rmtree(draft, ignore_errors=True)


def replace(draft: Path, target: Path) -> None:
    """Give a finished draft its name, unless what has it is no regular file: as root one would replace /dev/null."""
    if target.exists() and not target.is_file():
        raise ValueError("what has this name is not a regular file")
    os.replace(draft, target)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system while this file or folder is written into a DataError.

    >>> with writing(Path("a.bin")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    jq.errors.DataError: cannot write a.bin: No space left on device
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        raise DataError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def locked(path: PathLike) -> Iterator[BinaryIO]:
    """Yield a file to append to, made if it is not there, that no other process or thread here writes until the block ends.

    Each write goes to the end, in one call. Where the system has no such locks, nothing keeps others away.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for word in ("one", "two"):
    ...         with locked(f"{folder}/words") as file:
    ...             _ = file.write(word.encode())
    ...     text(f"{folder}/words")
    'onetwo'
    """
    check_regular(path)
    with open(path, "a+b", buffering=0) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # of the open file: threads of this process wait, too; closing releases it
        yield cast(BinaryIO, file)


@contextlib.contextmanager
def new_folder(path: PathLike, replaces: Callable[[Path], bool], kept: str) -> Iterator[Path]:
    """Yield a draft folder that gets its name when the block ends without an error, and is removed otherwise.

    An existing folder is replaced only if it is empty or `replaces(folder)` is true; `kept` names it in the error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with new_folder(f"{parent}/made", lambda old: False, "is not empty") as draft:
    ...         write(draft / "note.txt", "words")
    ...     os.listdir(f"{parent}/made")
    ['note.txt']
    """
    final = Path(os.path.abspath(path))
    with writing(final):
        taken = final.is_symlink() or (final.exists() and not final.is_dir())
        taken = taken or (final.exists() and any(final.iterdir()) and not replaces(final))
    if taken:
        raise ConfigError(f"{final} {kept}; give the name of a new folder")
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with writing(final):
            draft = stack.enter_context(draft_folder(final))
        yield draft
        with writing(final):
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)


def safe_name(text: str) -> str:
    """Return a valid file name close to the text: a tensor's name may hold any character.

    >>> safe_name("model/conv:0"), safe_name("../..")
    ('model_conv_0', '_..')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".")[:80]


def check_writable(output: PathLike | None, model: Any = None) -> None:
    """Raise a ConfigError, before any work, if the file cannot be written or would overwrite the float model."""
    if output is None:
        return
    try:
        path = Path(output)
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, TypeError) as error:  # too long a name, a null byte in it, no name at all
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"the output {output!r} cannot be written: {cause}") from error
    if isinstance(model, (str, os.PathLike)) and path.is_file() and Path(model).exists() and path.samefile(model):
        raise ConfigError(f"the output {path} is the float model itself; give another name")
    if path.is_dir():
        raise ConfigError(f"the output {path} is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"the output {path} is not a regular file; give the name of a new file")
    folder = next(p for p in (path.parent, *path.parent.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the output {path} cannot be written: {folder} is not a folder that may be written to")


def check_apart(outputs: Mapping[str, PathLike | Iterable[PathLike] | None], inputs: Iterable[Any]) -> None:
    """Raise a ConfigError if two of the outputs are one file, or one is a file that is read.

    >>> check_apart({"--output": "a.html", "--report": "./a.html"}, [])
    Traceback (most recent call last):
    jq.errors.ConfigError: --output and --report are the same file, ./a.html; give two names
    """
    taken: dict[str, str] = {}
    read = {os.path.realpath(i) for i in inputs if isinstance(i, (str, os.PathLike)) and _is_file(i)}
    for option, paths in outputs.items():
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths or ():
            place = os.path.realpath(path)
            if place in taken:
                raise ConfigError(f"{taken[place]} and {option} are the same file, {path}; give two names")
            if place in read:
                raise ConfigError(f"{option} is {path}, which is read as well; give another name")
            taken[place] = option


def _is_file(path: PathLike) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a null byte
        return False
