"""`model.generate` through a Generator equals transformers' loop; other calls use that loop.

On a CPU a tape replaces the CUDA graph.
"""

import copy
import gc
import io
import logging
import threading
import weakref

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from flash_frac.data.tokenizer import byte_tokenizer
from flash_frac.inference import generator, graphs, routing
from flash_frac.models import FracCache, FracForCausalLM
from flash_frac.models.generation import KEPT
from flash_frac.ops.sample import reference
from tests.inference.engines import ALL_KINDS, make
from tests.inference.tape import Tape
from tests.models.conftest import make_model
from tests.models.hybrids import OWN_LOOP

DEVICES = [pytest.param("cpu", id="tape"), pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
TAKEN, LEFT = "generate: a Generator", "generate: transformers' loop, because "


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch, caplog):
    """A device on which models are recorded, while the log says what became of calls."""
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "Graph", Tape)
        monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
        # On a CPU, steps that no request needs are left out, which a graph could not do.
        monkeypatch.setattr(reference, "_may_hold", lambda condition: True)
    else:
        # A fixture sets it back; memory that nobody has written stays NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(generator, "LOOK_EVERY", 3, raising=False)
    caplog.set_level(logging.DEBUG, routing.logger.name)
    yield request.param
    KEPT.clear()


@pytest.fixture
def recorded(monkeypatch):
    """A list with an item for each graph that was recorded."""
    made, make = [], graphs.Graph.__init__
    counted = lambda *x, **y: made.append(None) or make(*x, **y)  # noqa: E731
    monkeypatch.setattr(graphs.Graph, "__init__", counted)
    return made


@pytest.fixture
def model(device):
    return make_model(torch.float32).to(device)


@pytest.fixture
def ids(device):
    given = torch.randint(3, 61, (3, 12), generator=torch.Generator().manual_seed(0))
    return given.to(device)


@pytest.fixture
def path(caplog):
    """Where the last call went: TAKEN, or LEFT and the reason."""

    def last():
        found = [x.getMessage() for x in caplog.records if x.name == routing.logger.name]
        caplog.clear()
        return found[-1]

    return last


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :11] = 0, 0
    return mask


def ends(model, ids, *places):
    """Tokens that a greedy answer has at these rows and columns."""
    free = model.generate(ids, **GREEDY, **OWN_LOOP)[:, ids.shape[1] :]
    return [int(free[place]) for place in places]


def assert_same(ours, theirs):
    assert torch.equal(ours, theirs)
    assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)


class Put(BaseStreamer):
    """Keeps what is put."""

    def __init__(self):
        self.put_so_far, self.ended = [], 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.put_so_far.append(value.tolist())

    def end(self):
        self.ended += 1


class Letter(torch.nn.Module):
    """A stopping criterion of somebody: rows end with any of these tokens, and pads follow none."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def forward(self, ids, scores, **_):
        assert scores is None
        return torch.isin(ids[:, -1], torch.tensor(self.tokens, device=ids.device))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_greedy(kind, device, recorded, ids, path):
    """Three times each, so that graphs are recorded and replayed."""
    model = make(kind).to(device)
    one, other = ends(model, ids, (0, 2), (1, 5))
    calls = [
        {},
        {"attention_mask": padded(ids)},
        {"eos_token_id": one},
        {"eos_token_id": [one, other], "attention_mask": padded(ids)},
        {"repetition_penalty": 5.0},
    ]
    for call in calls:
        expected = model.generate(ids, **GREEDY | call, **OWN_LOOP)
        assert path() == LEFT + "of cache_implementation='dynamic'"
        for _ in range(3):
            assert_same(model.generate(ids, **GREEDY | call), expected)
            assert path() == TAKEN
    assert recorded


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": None, "max_length": 16},
        {"max_new_tokens": None},
        {"max_new_tokens": 1},
        {"pad_token_id": None},
        {"pad_token_id": None, "several": True},
        {"pad_token_id": 60},
        {"several": True},
        # No token ever is.
        {"eos_token_id": [-1]},
        {"eos_token_id": None, "pad_token_id": None},
        {"max_time": 60.0},
        {"max_time": 0.0},
        {"letter": True},
        {"letter": True, "eos_token_id": None},
    ],
    ids=str,
)
def test_ends(model, ids, path, options):
    options = dict(options)
    one, other = ends(model, ids, (0, 2), (1, 5))
    if options.pop("several", False):
        options["eos_token_id"] = [one, other]
    if options.pop("letter", False):
        options["stopping_criteria"] = StoppingCriteriaList([Letter([other])])
    call = {**GREEDY, "eos_token_id": one, **options}
    for given in (ids, ids[:1]):
        expected = model.generate(given, **call, **OWN_LOOP)
        path()
        for _ in range(3):
            assert_same(model.generate(given, **call), expected)
            assert path() == TAKEN


def test_padding_that_is_no_token(model, ids, path):
    """It follows an end, and is never read."""
    (eos,) = ends(model, ids[:1], (0, 2))
    call = {**GREEDY, "eos_token_id": eos, "pad_token_id": 1000}
    expected = model.generate(ids[:1], **call, **OWN_LOOP)
    assert_same(model.generate(ids[:1], **call), expected)
    assert path() == TAKEN


def test_stop_strings(device, path):
    """The text may begin in the prompt, as transformers has it."""
    tokenizer = byte_tokenizer()
    model = make_model(torch.float32, vocab_size=len(tokenizer)).to(device)
    ids = torch.tensor([[100, 101, 102], [70, 80, 90]], device=device)
    free = model.generate(ids, **GREEDY, **OWN_LOOP)
    for cut in ((3, 4), (2, 4)):
        text = tokenizer.decode(free[0, slice(*cut)])
        for eos in (None, int(free[1, 5])):
            call = {**GREEDY, "eos_token_id": eos, "stop_strings": [text], "tokenizer": tokenizer}
            expected = model.generate(ids, **call, **OWN_LOOP)
            assert_same(model.generate(ids, **call), expected)
            assert path() == TAKEN


def test_inputs_of_other_types(model, ids, path):
    """Ids in int32, masks of bools, and both on a CPU."""
    call = {"input_ids": ids.cpu().int(), "attention_mask": padded(ids).cpu().bool(), **GREEDY}
    assert_same(model.generate(**call), model.generate(**call, **OWN_LOOP))
    path()
    # The bos token of the model, without a prompt.
    model.generation_config.bos_token_id = 5
    assert_same(model.generate(**GREEDY), model.generate(**GREEDY, **OWN_LOOP))
    config = GenerationConfig(**GREEDY, eos_token_id=None)
    assert_same(model.generate(ids, config), model.generate(ids, **GREEDY, **OWN_LOOP))
    model.generate(ids, config)
    assert path() == TAKEN


def test_streamers(model, ids, path):
    eos = ends(model, ids, (0, 2), (1, 5))
    found = []
    for options in (OWN_LOOP, {}):
        streamer = Put()
        model.generate(ids, streamer=streamer, eos_token_id=eos, **GREEDY, **options)
        assert streamer.ended == 1
        found.append(streamer.put_so_far)
    assert path() == TAKEN
    assert found[0] == found[1]


@pytest.mark.parametrize("several", [False, True])
def test_sampling_is_reproducible(model, ids, path, several):
    call = {**GREEDY, "do_sample": True, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5}
    if several:
        call |= {"num_return_sequences": 4, "streamer": Put()}
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made += [model.generate(ids, **call), model.generate(ids, **call)]
    assert path() == TAKEN
    assert made[0].shape == ((12 if several else 3), 20)
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[0], made[4])
    if several:
        assert torch.equal(made[0][:, :12], ids.repeat_interleave(4, 0))
        assert len({tuple(row) for row in made[0][:4].tolist()}) == 4


def test_what_may_be_drawn(model, ids, path):
    """The settings of transformers' processors are those of the call."""
    greedy = model.generate(ids, **GREEDY, **OWN_LOOP)
    for options in ({"top_k": 1}, {"top_k": 0, "top_p": 1e-6}, {"top_k": 0, "temperature": 1e-6}):
        made = model.generate(ids, **GREEDY | {"do_sample": True}, **options)
        assert path() == TAKEN
        assert torch.equal(made, greedy)
    made = model.generate(ids, **GREEDY | {"do_sample": True}, top_k=0, min_p=0.999999)
    assert torch.equal(made, greedy)


def test_greedy_calls_draw_nothing(model, ids, path):
    on_gpu = model.device.type == "cuda"
    get_state = torch.cuda.get_rng_state if on_gpu else torch.get_rng_state
    state = get_state()
    model.generate(ids, **GREEDY)
    assert path() == TAKEN
    assert torch.equal(get_state(), state)


class Doubled(torch.nn.Module):
    def forward(self, ids, scores):
        return 2 * scores


def processors(*given):
    return {"logits_processor": LogitsProcessorList(given)}


# Options that a Generator does not know, and what the log says of them.
OTHERS = [
    ({"use_cache": False}, "of use_cache=False"),
    ({"cache_implementation": "static"}, "of cache_implementation='static'"),
    ({"return_dict_in_generate": True}, "of return_dict_in_generate=True"),
    ({"output_logits": True}, "of output_logits=True"),
    ({"prefill_chunk_size": 5}, "of prefill_chunk_size=5"),
    ({"min_new_tokens": 3, "eos_token_id": 5}, "of min_length=15"),
    ({"no_repeat_ngram_size": 2}, "of no_repeat_ngram_size=2"),
    ({"bad_words_ids": [[7]]}, "of bad_words_ids=[[7]]"),
    ({"suppress_tokens": [7]}, "of suppress_tokens=[7]"),
    ({"renormalize_logits": True}, "of renormalize_logits=True"),
    (processors(Doubled()), "of its logits processors ['Doubled']"),
    (processors(LogitNormalization()), "of its logits processors ['LogitNormalization']"),
    (processors(TemperatureLogitsWarper(0.5)), "of its logits processors ['Temperature"),
    (
        processors(RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=3)),
        "of its logits processors ['RepetitionPenalty",
    ),
    ({"do_sample": True, "typical_p": 0.5}, "of typical_p=0.5"),
    (
        {"do_sample": True, **processors(MinPLogitsWarper(0.1))},
        "of its logits processors ['MinPLogitsWarper', 'TopK",
    ),
    (
        {"do_sample": True, **processors(TopKLogitsWarper(5, filter_value=-3.0))},
        "of its logits processors ['TopK",
    ),
    ({"do_sample": True, "min_p": 1.0}, "of its logits processors ['TopK"),
]


@pytest.fixture
def own_loop(monkeypatch):
    """Runs `generate` while no model is recorded."""

    def run(model, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "DEVICES", ())
            return model.generate(*arguments, **options)

    return run


@pytest.mark.parametrize(("options", "reason"), OTHERS, ids=lambda x: str(x)[:30])
def test_calls_that_ask_for_more(model, ids, path, own_loop, options, reason):
    torch.manual_seed(0)
    made = model.generate(ids, **GREEDY | options)
    assert path().startswith(LEFT + reason)
    torch.manual_seed(0)
    expected = own_loop(model, ids, **GREEDY | options)
    if options.get("return_dict_in_generate"):
        assert made.past_key_values.get_seq_length() == 19
        made, expected = made.sequences, expected.sequences
    assert torch.equal(made, expected)


def test_beams_are_not_asked_about(model, ids, caplog):
    model.generate(ids, **GREEDY, num_beams=2)
    assert not [x for x in caplog.records if x.name == routing.logger.name]


def test_fields_that_nobody_here_knows():
    """Every field of a GenerationConfig, and any that later ones may have, unless understood."""
    assert routing.unusual_field(GenerationConfig()) is None
    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name in [*names, "field_of_a_later_release"]:
        for value in (7, "x", [1]):
            config = GenerationConfig()
            setattr(config, name, value)
            known = name in routing.UNDERSTOOD
            assert routing.unusual_field(config) == (None if known else f"{name}={value!r}")
    assert set(names) > routing.UNDERSTOOD


def test_inputs_that_are_not_for_it(model, ids, path, own_loop):
    cache = FracCache(model.config)
    made = model.generate(ids, past_key_values=cache, **GREEDY)
    assert path() == LEFT + "past_key_values is the caller's"
    assert cache.get_seq_length() == 19
    assert torch.equal(made, own_loop(model, ids, **GREEDY))

    inside = torch.ones_like(ids)
    inside[1, 4:6] = 0
    made = model.generate(ids, attention_mask=inside, **GREEDY)
    assert path() == LEFT + "attention_mask has padding that is not on the left"
    assert torch.equal(made, own_loop(model, ids, attention_mask=inside, **GREEDY))

    right = inside.flip(1)
    right[1, -1] = 0
    model.generate(ids, attention_mask=right, **GREEDY)
    assert path() == LEFT + "attention_mask is not 1 at the last token of every prompt"

    call = {"attention_mask": padded(ids), "repetition_penalty": 2.0, **GREEDY}
    made = model.generate(ids, **call)
    assert path() == LEFT + "transformers also applies repetition_penalty to padding"
    assert torch.equal(made, own_loop(model, ids, **call))

    model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
    assert path() == LEFT + "input_ids have shape (3, 0), and the longest is 8 more"


def test_calls_of_several_ranks(model, ids, path):
    """They go to transformers' loop, which has nobody to talk to here."""
    with pytest.raises(ValueError, match="process group has not been initialized"):
        model.generate(ids, synced_gpus=True, **GREEDY)
    assert path() == LEFT + "synced_gpus is set"


def test_elapsed(model, ids, path, own_loop):
    call = {
        "elapsed": torch.full_like(ids, 2.0, dtype=torch.float32),
        **GREEDY,
        "max_new_tokens": 1,
    }
    made = model.generate(ids, **call)
    assert path() == LEFT + "of elapsed"
    assert torch.equal(made, own_loop(model, ids, **call))


def test_positions(model, ids, path, own_loop):
    """Those that count tokens are the usual ones; what the model refuses is refused."""
    positions = torch.arange(12, device=ids.device).expand(3, -1)
    made = model.generate(ids, position_ids=positions + 7, **GREEDY)
    assert path() == TAKEN
    assert torch.equal(made, own_loop(model, ids, **GREEDY))
    for run in (model.generate, lambda *x, **y: own_loop(model, *x, **y)):
        with pytest.raises(ValueError, match="position_ids must increase by one per token"):
            run(ids[:1], position_ids=positions[:1] % 5, **GREEDY)


def test_models_that_are_not_for_it(model, ids, path, own_loop):
    with torch.autocast(model.device.type, torch.bfloat16):
        model.generate(ids, **GREEDY)
    assert path() == LEFT + "autocast is on"
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    model.generate(ids, **GREEDY)
    assert path().startswith(LEFT + "the model cannot be recorded on")
    hook.remove()
    model.train().generate(ids, **GREEDY)
    assert path() == LEFT + "the model is in training mode"
    model.eval().generate(ids, **GREEDY)
    assert path() == TAKEN
    model.model.norm.compile(backend="eager")
    model.generate(ids, **GREEDY)
    assert path() == LEFT + "a part of the model is compiled"


def test_attention_of_others(device, ids, path):
    model = make("attention").to(device)
    model.config._attn_implementation = "somebody's"
    assert routing.reason_of_model(model) == 'attn_implementation is "somebody\'s"'


def test_without_a_gpu(caplog):
    caplog.set_level(logging.DEBUG, routing.logger.name)
    make_model(torch.float32).generate(torch.tensor([[5, 6]]), **GREEDY)
    assert "the model cannot be recorded on cpu" in caplog.text


@torch.no_grad()
def test_a_model_that_changes(model, ids, path):
    """In place, and by other parameters, another dtype, another head."""

    def scale(model):
        model.model.layers[1].mixer.in_proj.weight *= -0.5

    def replace(model):
        weight = model.model.layers[1].mixer.in_proj.weight
        model.model.layers[1].mixer.in_proj.weight = torch.nn.Parameter(-0.5 * weight)

    def cast(model):
        replace(model.double())

    def swap(model):
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.weight *= -1

    before = [model.generate(ids, **GREEDY) for _ in range(3)][-1]
    for change in (scale, replace, cast, swap):
        change(model)
        after = model.generate(ids, **GREEDY, **OWN_LOOP)
        assert not torch.equal(after, before)
        for _ in range(3):
            assert torch.equal(model.generate(ids, **GREEDY), after)
            assert path() == TAKEN
        before = after


def test_it_goes_with_the_model(device, ids):
    model = make_model(torch.float32).to(device)
    for _ in range(3):
        model.generate(ids, **GREEDY)
    made = weakref.ref(KEPT[model]._generator)
    parts = [weakref.ref(x) for x in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert all(x() is None for x in parts) and not KEPT
    finally:
        gc.enable()
    gc.collect()
    assert made() is None


def test_copies_and_files_have_nothing_of_it(model, ids, tmp_path, path):
    names = set(vars(model))
    expected = model.generate(ids, **GREEDY)
    assert set(vars(model)) == names
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model.save_pretrained(tmp_path)
    copies = [
        copy.deepcopy(model),
        torch.load(file, weights_only=False),
        FracForCausalLM.from_pretrained(tmp_path).to(model.device),
    ]
    for other in copies:
        assert other not in KEPT
        with torch.no_grad():
            model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
        assert torch.equal(other.generate(ids, **GREEDY), expected)
        assert path() == TAKEN
    assert not torch.equal(model.generate(ids, **GREEDY), expected)


def test_training_gives_memory_back(model, ids):
    model.generate(ids, **GREEDY)
    assert model in KEPT
    model.eval()
    assert model in KEPT
    model.train()
    assert model not in KEPT


def test_a_model_that_has_moved_leaves_nothing(model, ids, own_loop):
    model.generate(ids, **GREEDY)
    own_loop(model, ids, **GREEDY)
    assert model not in KEPT


def test_two_calls_at_once(model, ids, path, caplog):
    """The second one comes while the first is at a token, and takes transformers' loop."""
    expected = [model.generate(x, **GREEDY, **OWN_LOOP) for x in (ids, ids.flip(1))]
    second = []

    class Meanwhile(Put):
        def put(self, value):
            super().put(value)
            if len(self.put_so_far) == 4:
                run = lambda: second.append(model.generate(ids.flip(1), **GREEDY))  # noqa: E731
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()

    first = model.generate(ids, streamer=Meanwhile(), **GREEDY)
    assert path() == LEFT + "another call is running"
    assert torch.equal(first, expected[0]) and torch.equal(second[0], expected[1])
    assert torch.equal(model.generate(ids, **GREEDY), expected[0])
    assert path() == TAKEN


def test_a_call_that_fails_leaves_it_usable(model, ids, path):
    class Broken(Put):
        def put(self, value):
            super().put(value)
            if len(self.put_so_far) == 4:
                raise KeyError("broken")

    expected = model.generate(ids, **GREEDY, **OWN_LOOP)
    with pytest.raises(KeyError, match="broken"):
        model.generate(ids, streamer=Broken(), **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert path() == TAKEN


def test_no_memory(model, ids, monkeypatch, caplog):
    """transformers' cache grows with the answer, where a Generator reserves all of it."""
    expected = model.generate(ids, **GREEDY, **OWN_LOOP)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(generator.Generator, "generate", fail)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert "not enough memory for a Generator, which reserves 8 tokens per sequence" in caplog.text
    assert model not in KEPT
