"""The KEP's table of recipes, with distributed whenever there is more than one process."""

from __future__ import annotations

import pytest

from luthier.errors import ConfigError
from luthier.jobs import BuiltinTrainer, LoraConfig, TorchTuneConfig
from luthier.jobs.catalogue import recipes, run_of, selections
from luthier.jobs.select import select

TABLE = [
    # peft, nodes, processes -> recipe, config
    ("full", 1, 1, "full_finetune_single_device", "full_single_device"),
    ("full", 1, 2, "full_finetune_distributed", "full"),
    ("full", 2, 1, "full_finetune_distributed", "full"),
    ("full", 2, 8, "full_finetune_distributed", "full"),
    ("lora", 1, 1, "lora_finetune_single_device", "lora_single_device"),
    ("lora", 1, 2, "lora_finetune_distributed", "lora"),
    ("lora", 2, 1, "lora_finetune_distributed", "lora"),
    ("lora", 2, 8, "lora_finetune_distributed", "lora"),
    ("qlora", 1, 1, "lora_finetune_single_device", "qlora_single_device"),
    ("qlora", 1, 8, "lora_finetune_distributed", "qlora"),
    ("lora", 1, None, "lora_finetune_distributed", "lora"),
]


@pytest.mark.parametrize(("peft", "nodes", "processes", "recipe", "config"), TABLE)
def test_the_table(peft, nodes, processes, recipe, config):
    assert select(peft, nodes, processes).recipe == recipe
    assert select(peft, nodes, processes, "llama3.2-1b").config == f"llama3.2-1b/{config}"


@pytest.mark.parametrize(("peft", "nodes", "processes", "recipe"), [row[:4] for row in TABLE if row[2] is not None])
def test_jobs_are_told_by_it(client, peft, nodes, processes, recipe):
    if peft == "qlora":
        return
    lora = LoraConfig() if peft == "lora" else None
    config = TorchTuneConfig(num_nodes=nodes, num_procs_per_node=processes, peft_config=lora)
    assert client.train("luthier-llama3.2-1b", trainer=BuiltinTrainer(config), dry_run=True).recipe == recipe


def test_an_adapter_without_attention_is_still_one(client):
    """Kubeflow tells an adapter by a field that it drops when it is empty, and trains the whole model."""
    lora = LoraConfig(lora_attn_modules=[], apply_lora_to_mlp=True)
    config = TorchTuneConfig(peft_config=lora)
    spec = client.train("luthier-llama3.2-1b", trainer=BuiltinTrainer(config), dry_run=True)
    assert spec.recipe == "lora_finetune_single_device"
    assert spec.config["adapter"]["target"] == ["mlp"]


def test_every_config_of_the_catalogue_is_a_run():
    from luthier.config.load import check_config

    names = [selection.config for selection in selections()]
    assert len(names) == len(set(names)) == 4 * 27
    assert set(recipes()) == {row[3] for row in TABLE}
    for name in names:
        config, faults = check_config(run_of(name))
        assert faults == []
        assert config is not None
        assert (config.adapter is not None) == ("/lora" in name)


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("llama3.2-1b/lora_single_devise", None, "did you mean llama3.2-1b/lora_single_device?"),
        ("llama3.2-vision-11b", None, "reads pictures"),
        ("llama3.2-1b/full_single_device", 2, "is for one process, not 2; take llama3.2-1b/full"),
    ],
)
def test_configs_that_there_are_not(name, gpus, words):
    with pytest.raises(ConfigError) as caught:
        run_of(name, gpus)
    assert words in str(caught.value)
