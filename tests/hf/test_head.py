"""The head: equal to the model's own forward everywhere, and told apart where it is one matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from luthier.batch import Batch, Sample
from luthier.hf.debug.tiny import debug_config
from luthier.hf.forward import hidden_states
from luthier.hf.head import HeadInfo, head_logits, linear_head
from luthier.hf.load import load_model
from luthier.hf.source import resolve

IDS = list(range(4, 30))
CASES = [
    ("llama", {}, (1.0, None)),
    ("gemma2", {}, (1.0, 30.0)),
    ("cohere2", {}, (0.0625, None)),
    ("granite", {"logits_scaling": 6.0}, (1 / 6, None)),
    ("gemma2", {"final_logit_softcapping": 5.0}, (1.0, 5.0)),
    ("recurrent_gemma", {}, (1.0, 30.0)),
    ("phi", {}, (1.0, None)),
    ("gpt2", {}, (1.0, None)),
    ("opt", {}, (1.0, None)),
    ("mixtral", {}, (1.0, None)),
    ("minicpm3", {}, (4.0, None)),
]


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(("kind", "changes", "expected"), CASES)
def test_scale_and_cap_are_read_off_the_forward(
    kind: str, changes: dict[str, float], expected: tuple[float, float | None], dtype: str
) -> None:
    model = load_model(resolve(f"debug:{kind}"), config=debug_config(kind, **changes), dtype=dtype)
    head = linear_head(model)
    assert head is not None
    assert (head.scale, head.softcap) == expected
    assert head.weight is model.get_output_embeddings().weight
    assert (head.bias is None) == (kind != "phi")
    if dtype == "fp64":
        with torch.no_grad():
            head.weight.mul_(50)  # so that caps bite
            own = model(torch.tensor([IDS]), use_cache=False).logits[0]
            hidden = hidden_states(model, Batch.pack([Sample.from_ids([*IDS, 0], [1.0] * (len(IDS) + 1))]))
            torch.testing.assert_close(
                head_logits(model, hidden), own, rtol=0, atol=1e-10 if kind != "gemma2" else 1e-5
            )
            torch.testing.assert_close(head.logits(hidden), own, rtol=1e-5, atol=1e-5)


def test_head_logits_are_the_models_own_bit_for_bit() -> None:
    model = load_model(resolve("debug:gemma2"), attention="eager")
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS]), use_cache=False).last_hidden_state[0]
        assert torch.equal(head_logits(model, hidden), model(torch.tensor([IDS])).logits[0])
        chunk = hidden[5:9]
        torch.testing.assert_close(head_logits(model, chunk), head_logits(model, hidden)[5:9])
    assert isinstance(model.model, nn.Module), "the model is left as it was"
    assert type(model.model).__name__ == "Gemma2Model"


def test_gradients_reach_hidden_states_and_head() -> None:
    model = load_model(resolve("debug:cohere2"), dtype="fp64")
    hidden = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    head_logits(model, hidden).square().sum().backward()
    weight = model.lm_head.weight
    first, second = hidden.grad, weight.grad
    assert first is not None
    assert second is not None
    other = hidden.detach().requires_grad_(True)
    weight.grad = None
    (other @ weight.T * 0.0625).square().sum().backward()
    torch.testing.assert_close(first, other.grad)
    torch.testing.assert_close(second, weight.grad)


@pytest.mark.parametrize("kind", ["modernbert-decoder"])
def test_a_head_of_several_parts_is_not_called_linear(kind: str) -> None:
    assert linear_head(load_model(resolve(f"debug:{kind}"))) is None


def test_an_adapted_head_is_not_called_linear() -> None:
    model = load_model(resolve("debug:llama"))
    model.lm_head.lora_A = nn.Linear(64, 2, bias=False)  # adds nothing yet, but is there
    assert linear_head(model) is None


def test_a_forward_with_something_between_is_not_called_linear() -> None:
    model = load_model(resolve("debug:llama"))
    base = type(model)

    class Shifted(base):  # type: ignore[misc, valid-type]
        def forward(self, **kwargs):  # type: ignore[no-untyped-def]
            output = super().forward(**kwargs)
            output.logits = output.logits + 1.0
            return output

    model.__class__ = Shifted
    assert linear_head(model) is None


def test_head_info_says_what_it_computes() -> None:
    head = nn.Linear(2, 2)
    head.weight.data, head.bias.data = torch.eye(2), torch.tensor([1.0, 0.0])
    info = HeadInfo(head, scale=2.0, softcap=3.0)
    torch.testing.assert_close(info.logits(torch.tensor([[1.0, 0.5]])), 3 * torch.tanh(torch.tensor([[4.0, 1.0]]) / 3))


def test_automodel_is_the_oracle() -> None:
    model = load_model(resolve("debug:granite"), config=debug_config("granite", logits_scaling=3.0))
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    plain.eval()
    head = linear_head(model)
    assert head is not None
    with torch.no_grad():
        hidden = plain.model(torch.tensor([IDS])).last_hidden_state[0]
        torch.testing.assert_close(head.logits(hidden), plain(torch.tensor([IDS])).logits[0])
