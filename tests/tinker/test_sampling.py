"""Oracle: Transformers' own generate, and the trainer's forward."""

from __future__ import annotations

import pytest
import torch

from luthier.errors import UserError
from luthier.tinker import AdamParams, ModelInput, SamplingParams
from tests.tinker.models import client_of, make_data


def test_what_trains_is_sampled_and_a_snapshot_stays_as_it_was() -> None:
    client = client_of("llama", torch.float32)
    prompt = ModelInput.from_ints([3, 14, 15, 9])
    greedy = SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    kept = client.save_weights_and_get_sampling_client().result()
    live = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = client.sample(prompt, 1, greedy).result().sequences[0]
    with torch.no_grad():
        ids = torch.tensor([[3, 14, 15, 9]])
        mask = torch.ones_like(ids)
        plain = client.model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert before.tokens == plain[0, 4:].tolist()
    assert before.stop_reason == "length"
    with torch.no_grad():
        rows = client.model(plain).logits[0, :-1].log_softmax(-1)
    exact = [None, *rows.gather(1, plain[0, 1:, None])[:, 0].tolist()]
    assert before.logprobs == pytest.approx(exact[4:], abs=1e-5)
    assert client.compute_logprobs(plain[0]).result() == pytest.approx(exact, abs=1e-5)
    assert kept.model.model.embed_tokens.weight is client.model.model.embed_tokens.weight  # what is frozen is shared

    told = client.sample(
        prompt, 3, SamplingParams(max_tokens=4, seed=1, stop=[]), include_prompt_logprobs=True, topk_sample_logprobs=2
    ).result()
    assert told.prompt_logprobs == pytest.approx(exact[:4], abs=1e-5)
    assert [len(one.topk_logprobs or []) for one in told.sequences] == [4, 4, 4]
    second = client.sample(prompt, 1, SamplingParams(max_tokens=4, seed=2, stop=[])).result().sequences[0]
    assert second.tokens == told.sequences[1].tokens

    client.forward_backward(make_data(weights="weights"))
    client.optim_step(AdamParams(learning_rate=0.1)).result()
    now = client.compute_logprobs(plain[0]).result()
    assert kept.compute_logprobs(plain[0]).result() == pytest.approx(exact, abs=1e-5)
    assert live.compute_logprobs(plain[0]).result() == pytest.approx(now, abs=1e-5)
    assert now[4:] != pytest.approx(exact[4:], abs=1e-2)
    with pytest.raises(UserError, match="kind: 'other' is unknown"):
        client.save_weights_and_get_sampling_client(kind="other").result()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="prompt: token 99 is not among"):
        client.sample([99], 1, greedy).result()
    with pytest.raises(UserError, match="stop: token 99 is not among the model's 67, and would end no text"):
        client.sample(prompt, 1, SamplingParams(max_tokens=1, stop=[99])).result()
    with pytest.raises(UserError, match=r"num_samples: 1\.5 is no number of texts"):
        client.sample(prompt, 1.5, greedy).result()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"prompt_logprobs_last_n: 1\.5 is no number from 1 to 3"):
        kept.compute_logprobs(prompt, 1.5).result()  # type: ignore[arg-type]
