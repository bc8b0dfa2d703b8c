"""The base class for all sections, and bounded numbers."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_COUNT = 2**31 - 1
YEAR_S = 31_536_000.0  # longest timeout; event loops reject 1e308 s
MAX_PROCESSES = 1024
MAX_NAME = 200  # characters in a run's name; file names have up to 255, and some add a suffix to the run's name
OLD_NAMES = {"api_base": "base_url", "url": "base_url"}  # key in judges and engines until 2026 -> current key


def _not_true_or_false(value: Any) -> Any:
    """Rejects bools, which pydantic accepts as 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "true and false are not numbers")
    return value


def _is_device(value: str) -> str:
    """Rejects names that torch does not know on any machine."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu|hpu|npu)(:[0-9]{1,3})?", value, re.ASCII):
        raise PydanticCustomError("device", "auto, cpu, cuda, or cuda:1 for the second GPU")
    return value


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)]
Device = Annotated[str, AfterValidator(_is_device)]
Int = Annotated[int, BeforeValidator(_not_true_or_false)]
Float = Annotated[float, BeforeValidator(_not_true_or_false)]
Seed = Annotated[Int, Field(ge=-(2**63), lt=2**63)]
PositiveInt = Annotated[Int, Field(gt=0, le=MAX_COUNT)]
Count = Annotated[Int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[Float, Field(gt=0, le=YEAR_S)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
UnitInterval = Annotated[Float, Field(ge=0, le=1)]


WeightsAt = Literal["here", "process", "server"]  # this process, a process on this machine, another machine


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `name=7` on a command line is a name
    )

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, data: Any) -> Any:
        """Renames old keys for a server's address. Raises ValueError for two of these keys."""
        if not isinstance(data, Mapping) or "base_url" not in cls.model_fields:
            return data
        given = [name for name in ("base_url", *OLD_NAMES) if name in data]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(map(repr, given))} are one key: keep {given[0]!r} alone")
        return {OLD_NAMES.get(name, name): value for name, value in data.items()}


class ImportedVariants:
    """More variants of a section, imported on first use: Annotated[A | B, ImportedVariants(names, section_of)]."""

    def __init__(self, names: Iterable[str], section_of: Callable[[str], type[Section]]) -> None:
        self.names, self.section_of = tuple(names), section_of

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        known = handler.generate_schema(Annotated[source, Field(discriminator="name")])
        return core_schema.no_info_wrap_validator_function(
            self._validated, known, serialization=core_schema.simple_ser_schema("any")
        )

    def _validated(self, value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        return self.section_of(name).model_validate(value) if name in self.names else known(value)
