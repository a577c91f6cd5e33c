"""What XLA has to be told of a device when anything is compiled for it, beside its defaults."""

from __future__ import annotations


def options(platform: str, kind: str) -> dict[str, str]:
    """Compiler options for a device by its platform and `device_kind`.

    Of TPU v7x: XLA wants bfloat16 operands of loops in tiles of 16 rows, where an executable's arguments come in tiles
    of 8. So it would copy all weights that a loop reads before the loop: those of a model whose rounds run several to a
    dispatch, and all experts of a mixture (libtpu of JAX 0.10.2 and 0.12).
    """
    if platform == "tpu" and kind.startswith("TPU7"):
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
    return {}
