"""On-policy distillation from frozen engines. Owner: `stages/teacher/stage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class DistillConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    use_opd: Annotated[
        bool, Meta(description="subtract the reverse KL to a teacher from the advantages (on-policy distillation)")
    ] = False
    opd_kl_coef: Annotated[float, Meta(gt=0, description="weight of the reverse KL to the teacher")] = 1.0
    opd_teacher: Annotated[
        tuple[str, ...],
        Meta(description="frozen engines that teach, by the names of --frozen-engine; default: all of them"),
    ] = ()
    opd_teacher_key: Annotated[
        str, Meta(description="metadata field that names a row's teacher; rows without it take the first")
    ] = "teacher"
