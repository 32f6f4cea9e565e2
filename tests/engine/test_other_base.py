"""An adapter that was made for another model than the one it is put on fits by its sizes alone: that is said."""

import json
import logging
from pathlib import Path

import pytest
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from luthier.config import LoraConfig
from luthier.engine.build import build_network
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("named", "said"),
    [("maker/Other-1B", "made for maker/Other-1B"), ("elsewhere/debug:llama", ""), (None, "")],
)
def test_another_base_is_named(named: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = AutoModelForCausalLM.from_config(debug_config("llama"))
    get_peft_model(plain, PeftLora(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": named}))
    with caplog.at_level(logging.WARNING, "luthier"):
        build_network(resolve("debug:llama"), adapter=LoraConfig(start_from=str(tmp_path)), precision="fp32")
    told = [record.getMessage() for record in caplog.records if "put on" in record.getMessage()]
    assert len(told) == bool(said)
    assert all(said in line and "is put on debug:llama" in line for line in told)
