"""Which recipe and which config a job takes, told from what it asks for, as KEP-2401 means it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Peft = Literal["full", "lora", "qlora"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a job trains by.

    Attributes:
        recipe: by torchtune's names ("lora_finetune_distributed"). All are one recipe here; the layout is config.
        config: of the catalogue ("llama3.2-1b/lora"), or of no model ("lora") where the runtime has none.
    """

    recipe: str
    config: str


def select(peft: Peft, num_nodes: int, processes: int | None, preset: str | None = None) -> Selection:
    """The table of the KEP, distributed whenever there is more than one process.

    Args:
        peft: what is trained.
        num_nodes: machines.
        processes: of each; None for one for each device, however many there are.
        preset: name in the catalogue.

    >>> select("lora", 1, 1, "llama3.2-1b")
    Selection(recipe='lora_finetune_single_device', config='llama3.2-1b/lora_single_device')
    >>> select("full", 2, 1).recipe
    'full_finetune_distributed'
    """
    single = num_nodes == 1 and processes == 1
    recipe = f"{'full' if peft == 'full' else 'lora'}_finetune_{'single_device' if single else 'distributed'}"
    config = f"{peft}_single_device" if single else peft
    return Selection(recipe, f"{preset}/{config}" if preset is not None else config)
