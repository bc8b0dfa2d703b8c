"""CSV files: the first line names the columns, and every value is text."""

import csv
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from art_cli.rollouts.tables.columns import MAX_CELL, Columns, TableRow
from art_cli.runs.json_lines import foreign_format
from art_cli.runtime.errors import DataError, printable

DELIMITERS = ",;\t"  # delimiters used by spreadsheets, depending on country and format


def rows(path: Path, columns: Columns) -> Generator[TableRow]:
    """Yields the rows of a UTF-8 CSV file. The delimiter (comma, semicolon, or tab) is detected from the header.

    Raises DataError for other encodings, empty files, rows whose length differs from the header, cells or lines longer
    than MAX_CELL characters, and unclosed quotes.
    """
    with path.open("rb") as file:
        if words := foreign_format(file.read(4)):
            raise DataError(words, path)
    line = 0
    limit = csv.field_size_limit(MAX_CELL)  # one for the whole process
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(_lines(text), delimiter=_delimiter(path), strict=True)
            header: list[str] = []
            for cells in reader:
                line, started = reader.line_num, line + 1
                if not cells:
                    continue
                if not header:
                    header = cells
                    wanted = [(name, header.index(name)) for name in columns.wanted(header, f"{path}:{line}")]
                    continue
                if len(cells) != len(header):
                    raise DataError(f"{len(cells)} cells, and the header has {len(header)}", path, started)
                yield TableRow(f"{path}:{started}", {name: cells[index] for name, index in wanted})
            if not header:
                raise DataError("the file is empty", path)
    except UnicodeDecodeError:
        raise DataError("the text is not UTF-8; save it as UTF-8", path, _foreign_line(path)) from None
    except csv.Error as error:
        hint = "is a quote left open?" if "limit" in str(error) or "unexpected end" in str(error) else ""
        raise DataError(f"not CSV: {printable(error)}{'; ' if hint else ''}{hint}", path, line + 1) from None
    finally:
        csv.field_size_limit(limit)


def _foreign_line(path: Path) -> int | None:
    """Returns the number of the first line that is not UTF-8. The decoder's own position is that of a whole buffer."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return None


def _lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(MAX_CELL + 1):
        if len(line) > MAX_CELL:
            raise csv.Error(f"a line of more than {MAX_CELL >> 20} Mi characters")
        yield line


def _delimiter(path: Path) -> str:
    """Returns the delimiter that splits the header into the most columns; a comma by default."""
    with path.open(encoding="utf-8-sig", newline="") as text:
        header = next(_lines(text), "")
    return max(DELIMITERS, key=lambda each: len(next(csv.reader([header], delimiter=each), [])))
