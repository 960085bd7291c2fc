"""Which arguments give the numbers of `torch.optim`: the rows that `test_torch_optim` runs and docs/optimizers.md shows.

`python -m tests.numerics.torch_optim_table` writes the page.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

import funzero as fz
from funzero.transforms.optim.adagrad import adagrad
from funzero.transforms.optim.adam import adam, adamw
from funzero.transforms.optim.adan import adan
from funzero.transforms.optim.amsgrad import amsgrad
from funzero.transforms.optim.lion import lion
from funzero.transforms.optim.nadam import nadam, nadamw
from funzero.transforms.optim.rmsprop import rmsprop
from funzero.transforms.optim.schedule_free import schedule_free_adamw, schedule_free_sgd

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
NAMES: dict[str, Any] = {
    **{"chain": fz.chain, "add_decayed_weights": fz.add_decayed_weights, "sgd": fz.sgd},
    **{f.__name__: f for f in (adagrad, adam, adamw, adan, amsgrad, lion, nadam, nadamw, rmsprop)},
    **{f.__name__: f for f in (schedule_free_adamw, schedule_free_sgd)},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """The same optimizer in both libraries, as Python text.

    Attributes:
        twin: without `torch.optim.` and the params; empty where torch has none. differs: why the numbers are not equal.
    """

    funzero: str
    twin: str = ""
    note: str = ""
    differs: str = ""

    def tx(self) -> fz.Transform:
        """funzero's."""
        return eval(self.funzero, NAMES)

    def optimizer(self, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        """torch's."""
        name, arguments = self.twin.split("(", 1)
        return eval(f"optimizer(params, {arguments}", {"optimizer": getattr(torch.optim, name), "params": params})


COUPLED = "torch adds the decay to the gradient"
OUTSIDE = "torch adds eps after the root"
ROWS = (
    Row("sgd(0.1)", "SGD(lr=0.1)"),
    Row("sgd(0.1, momentum=0.9)", "SGD(lr=0.1, momentum=0.9, dampening=0)", "without dampening"),
    Row("sgd(0.1, momentum=0.9, nesterov=True)", "SGD(lr=0.1, momentum=0.9, nesterov=True)"),
    Row(
        "chain(add_decayed_weights(0.1), sgd(0.1, momentum=0.9))",
        "SGD(lr=0.1, momentum=0.9, weight_decay=0.1)",
        COUPLED,
    ),
    Row("adam(1e-3)", "Adam(lr=1e-3)"),
    Row("adam(1e-3, b1=0.8, b2=0.99, eps=1e-6)", "Adam(lr=1e-3, betas=(0.8, 0.99), eps=1e-6)"),
    Row("chain(add_decayed_weights(0.1), adam(1e-3))", "Adam(lr=1e-3, weight_decay=0.1)", COUPLED),
    Row("adamw(1e-3, weight_decay=1e-2)", "AdamW(lr=1e-3)", "the default decay is 1e-4 here and 1e-2 in torch"),
    Row(
        "nadam(1e-3)",
        "NAdam(lr=1e-3, momentum_decay=1e6)",
        "so that torch's momentum is b1 from the start; up to its float32 product of momenta",
    ),
    Row(
        "nadamw(1e-3, weight_decay=0.1)",
        "NAdam(lr=1e-3, momentum_decay=1e6, weight_decay=0.1, decoupled_weight_decay=True)",
        "as for nadam",
    ),
    Row("nadam(1e-3)", "NAdam(lr=1e-3)", differs="torch lets the momentum rise with the step"),
    Row("rmsprop(1e-2, decay=0.99, eps_in_sqrt=False)", "RMSprop(lr=1e-2)", OUTSIDE),
    Row(
        "rmsprop(1e-2, decay=0.99, eps_in_sqrt=False, momentum=0.9)",
        "RMSprop(lr=1e-2, momentum=0.9)",
        "while the learning rate is constant: here it comes before the trace",
    ),
    Row(
        "rmsprop(1e-2, decay=0.9, eps_in_sqrt=False, centered=True)",
        "RMSprop(lr=1e-2, alpha=0.9, centered=True)",
        OUTSIDE,
    ),
    Row("rmsprop(1e-2)", "RMSprop(lr=1e-2, alpha=0.9)", differs="eps before the root here, after it in torch"),
    Row(
        "adagrad(0.1, initial_accumulator_value=0.1, eps=0.0)",
        "Adagrad(lr=0.1, initial_accumulator_value=0.1, eps=0.0)",
        "equal at eps=0 only, since torch adds it after the root",
    ),
    Row(
        "adagrad(lambda t: 0.1 / (1 + 0.5 * t), eps=0.0)",
        "Adagrad(lr=0.1, lr_decay=0.5, initial_accumulator_value=0.1, eps=0.0)",
        "lr_decay is a schedule",
    ),
    Row("adagrad(0.1)", "Adagrad(lr=0.1)", differs="other start and other place of eps"),
    Row(
        "amsgrad(1e-3, b2=0.8)",
        "Adam(lr=1e-3, betas=(0.9, 0.8), amsgrad=True)",
        differs="torch takes the maximum before it corrects the bias",
    ),
    Row("lion(1e-4)", differs="torch has none"),
    Row("adan(1e-3)", differs="torch has none"),
    Row("schedule_free_sgd(1.0)", differs="torch has none"),
    Row("schedule_free_adamw(0.0025)", differs="torch has none"),
)


def page() -> str:
    """The text of docs/optimizers.md."""
    lines = [
        "# Optimizers and torch.optim",
        "",
        "funzero's optimizers have Optax's formulas and defaults. This table says which arguments give the numbers of",
        "`torch.optim`, to 1e-12 over 10 steps in float64, and where none do. It is made by",
        "`python -m tests.numerics.torch_optim_table` from the rows that `tests/numerics/test_torch_optim.py` runs.",
        "",
        "| funzero | torch.optim | |",
        "|---|---|---|",
    ]
    for row in ROWS:
        twin = f"`{row.twin}`" if row.twin else "-"
        lines.append(f"| `{row.funzero}` | {twin} | {f'differs: {row.differs}' if row.differs else row.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
