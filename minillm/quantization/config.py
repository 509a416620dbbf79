"""QuantizationConfig: which format, which groups, which method. Built in chapter 15.

`LLM(quantization="int4")` names one of `NAMED`; a dict changes what it has to: {"method": "gptq", "weights": "int3"}.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from minillm.quantization.formats import FORMATS
from minillm.quantization.rtn import SCALE_FORMATS

METHODS = ("rtn", "gptq", "awq", "smoothquant", "llm_int8")
CALIBRATED = ("gptq", "awq", "smoothquant", "llm_int8")  # these look at data first
ROUND_ACTIVATIONS = ("smoothquant", "llm_int8")  # these have no other purpose
READ_BY = {  # fields that some methods alone look at
    "per_tensor": ("rtn", "smoothquant"),
    "scale_format": ("rtn",),
    "alpha": ("smoothquant",),
    "damping": ("gptq",),
    "act_order": ("gptq",),
    "outlier_threshold": ("llm_int8",),
}


@dataclass(frozen=True)
class QuantizationConfig:
    """How every matrix of the decoder layers is written in low-bit form.

    `weights` is a format of `FORMATS`; `group_size` inputs share a scale, None is a whole row. `activations` makes the
    products integer (or fp8) on both sides, their scales taken from each token, or fixed by calibration ("static").
    The output matrix, which reads the finest differences, is rounded to `lm_head`; None leaves it alone. The rest are
    the methods' own knobs (chapter 16). Raises ValueError naming the field, the value and what is allowed, also for a
    knob that is turned (is not at its default) and that nothing reads.
    """

    method: str = "rtn"
    weights: str = "int4"
    group_size: int | None = 64
    symmetric: bool = True
    per_tensor: bool = False
    scale_format: str | None = (
        None  # of a group: None, float16; "power_of_two" or "e4m3", 8 bits, as in MXFP4 and NVFP4
    )
    activations: str | None = None
    activation_scales: str = "token"
    lm_head: str | None = "int8"
    alpha: float = 0.5  # SmoothQuant: how much of the difficulty moves into the weights
    damping: float = 0.01  # GPTQ: share of the mean diagonal added to the Hessian
    act_order: bool = False  # GPTQ: the inputs with the largest activations first
    outlier_threshold: float = 6.0  # LLM.int8(): activations beyond it stay in high precision
    rotate: bool = False  # QuaRot: the residual stream, and the value heads, before anything is rounded
    num_documents: int = 64  # of the corpus, for calibration
    seed: int = 0  # which of them, and the signs of the rotation
    calibration: str | None = None  # a text file instead

    def __post_init__(self):
        self._one_of("method", METHODS)
        self._one_of("weights", tuple(FORMATS))
        self._one_of("activations", (None, "int8", "fp8"))
        self._one_of("activation_scales", ("token", "static"))
        self._one_of("lm_head", (None, *FORMATS))
        self._check_types()
        if self.group_size is not None and (not isinstance(self.group_size, int) or self.group_size < 1):
            raise ValueError(
                f"group_size={self.group_size!r} is not allowed; allowed: a number of inputs, or None for whole rows"
            )
        if not self.symmetric and not FORMATS[self.weights].is_integer:
            raise ValueError(
                f"symmetric=False is not allowed for weights={self.weights!r}; a zero point belongs to integers"
            )
        self._one_of("scale_format", SCALE_FORMATS)
        if self.scale_format is not None and (self.group_size is None or not self.symmetric or self.per_tensor):
            raise ValueError(
                f"scale_format={self.scale_format!r} is for groups without a zero point: "
                "it needs a group_size, symmetric=True and per_tensor=False"
            )
        if self.activations is not None:
            if self.weights != self.activations:
                raise ValueError(
                    f"activations={self.activations!r} with weights={self.weights!r} is not allowed; "
                    "both sides of a product are in one format"
                )
            if self.group_size is not None or not self.symmetric:
                raise ValueError(
                    "activations are multiplied as integers over a whole row: "
                    "they need group_size=None and symmetric=True"
                )
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} is not allowed; allowed: 0 to 1")
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"damping={self.damping} is not allowed; allowed: a share above 0, such as 0.01")
        if self.num_documents < 1:
            raise ValueError(f"num_documents={self.num_documents} is not allowed; calibration needs at least 1")
        self._check_read()

    @property
    def is_calibrated(self) -> bool:
        return self.method in CALIBRATED or (self.activations is not None and self.activation_scales == "static")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _check_types(self) -> None:
        """Raise TypeError for a field of the wrong kind: True is no number of inputs, and "no" is not False."""
        kinds = {"symmetric": bool, "per_tensor": bool, "act_order": bool, "rotate": bool}
        kinds |= {"num_documents": int, "seed": int}
        kinds |= dict.fromkeys(("alpha", "damping", "outlier_threshold"), (int, float)) | {
            "group_size": (int, type(None))
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                allowed = (
                    "True or False"
                    if kind is bool
                    else "a whole number"
                    if name in ("num_documents", "seed", "group_size")
                    else "a number"
                )
                raise TypeError(f"quantization: {name}={value!r} is not allowed; allowed: {allowed}")

    def _check_read(self) -> None:
        """Raise ValueError for a field that is not at its default although nothing reads it."""
        if self.method in ROUND_ACTIVATIONS and self.activations is None:
            raise ValueError(
                f"method={self.method!r} with activations=None is not allowed: "
                f"it is there to round activations too; start from {{'name': "
                f"{self.method!r}}}, which sets weights, activations and group_size"
            )
        if self.activation_scales == "static" and self.activations is None:
            raise ValueError(
                "activation_scales='static' with activations=None has nothing to scale; "
                "set activations, or leave it out"
            )
        if self.calibration is not None and not self.is_calibrated:
            raise ValueError(
                f"calibration={self.calibration!r} with method={self.method!r} is not read: "
                "nothing is calibrated; leave it out"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name, methods in READ_BY.items():
            if self.method not in methods and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with method={self.method!r} is not allowed: "
                    f"{' and '.join(methods)} alone {'read' if len(methods) > 1 else 'reads'} it; "
                    "leave it out, or change the method"
                )

    def _one_of(self, name: str, allowed: tuple) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(
                f"quantization: {name}={getattr(self, name)!r} is not allowed; allowed: {', '.join(map(str, allowed))}"
            )


NAMED = {
    "int8": QuantizationConfig(weights="int8", group_size=None),
    "int4": QuantizationConfig(weights="int4", group_size=64),
    "fp8": QuantizationConfig(weights="fp8", group_size=None, lm_head="fp8"),
    "fp4": QuantizationConfig(weights="fp4", group_size=32),
    "mxfp4": QuantizationConfig(weights="fp4", group_size=32, scale_format="power_of_two"),
    "nvfp4": QuantizationConfig(weights="fp4", group_size=16, scale_format="e4m3"),
    "gptq": QuantizationConfig(method="gptq", symmetric=False),
    "awq": QuantizationConfig(method="awq", symmetric=False),
    "smoothquant": QuantizationConfig(method="smoothquant", weights="int8", group_size=None, activations="int8"),
    "llm_int8": QuantizationConfig(method="llm_int8", weights="int8", group_size=None, activations="int8"),
}


def resolve(quantization: str | dict[str, Any] | QuantizationConfig | None) -> QuantizationConfig | None:
    """What `LLM(quantization=...)` means. A dict starts from the entry of `NAMED` that its "name" gives, if it has one.

    Raises ValueError for a name or a field that does not exist, TypeError for anything else.
    """
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    if isinstance(quantization, str):
        if quantization not in NAMED:
            raise ValueError(
                f"quantization={quantization!r} is not allowed; allowed: {', '.join(NAMED)}, "
                f"or a dict of {_field_names()}"
            )
        return NAMED[quantization]
    if not isinstance(quantization, dict):
        raise TypeError(f"quantization={quantization!r} is not allowed; allowed: None, {', '.join(NAMED)}, or a dict")
    changes = dict(quantization)
    base = resolve(changes.pop("name", None)) or QuantizationConfig()
    unknown = [name for name in changes if name not in {field.name for field in fields(QuantizationConfig)}]
    if unknown:
        raise ValueError(f"quantization has no field {unknown[0]!r}; fields: {_field_names()}")
    return QuantizationConfig(**(base.as_dict() | changes))


def _field_names() -> str:
    return ", ".join(field.name for field in fields(QuantizationConfig))
