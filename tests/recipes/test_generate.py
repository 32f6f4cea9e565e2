"""An answer comes in whole words while it is made, and the pieces are the answer."""

from luthier.config.load import load_config
from luthier.recipes.generate import answers, open_chat
from luthier.recipes.setup import inference_network, prepare_process, tokenizer_of


def test_pieces_of_a_talk_are_whole_words_and_make_up_the_answer() -> None:
    config = load_config(None, ["model=debug:llama", "data={}", "generation.max_new_tokens=40"])
    reply = open_chat(config)
    prompt = "Which way is north?"
    pieces = list(reply([{"role": "user", "content": prompt}]))
    model, tokenizer = inference_network(config, prepare_process(config), None).model, tokenizer_of(config)
    [(text, count)] = answers(model, tokenizer, [prompt], config.generation)
    assert count
    assert "".join(pieces).strip() == text
    assert len(pieces) > 1
    assert all(piece[-1] in " \n" for piece in pieces[:-1])
    assert list(reply([{"role": "user", "content": prompt}])) == pieces
