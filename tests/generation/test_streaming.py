"""Stop strings over pieces of text: whatever the cut, the result is that of one search in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.generation.streaming import StopStrings, TextStream
from bitnet_ref.tokenizers import TokenizerSettings
from bitnet_ref.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from bitnet_ref.tokenizers.settings import AddedToken
from bitnet_ref.tokenizers.vocabulary import Vocabulary

TEXT = st.text(alphabet="abX ", max_size=30)


@given(st.lists(TEXT, max_size=8), st.lists(st.text(alphabet="abX", min_size=1, max_size=4), max_size=3))
def test_pieces_give_what_the_whole_text_gives(pieces, stops):
    stream = StopStrings(stops)
    got = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    whole = "".join(pieces)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    if stream.found is None:
        assert not cuts
        assert got == whole
    else:
        # A shorter stop may be seen complete before a longer one that begins earlier is: both end the text.
        assert whole.startswith(got + stream.found)
        assert not any(stop in got for stop in stops)


def test_text_is_held_back_only_where_it_may_begin_a_stop():
    stream = StopStrings(["STOP"])
    assert [stream.push(text) for text in ("go ", "on S", "T", "A S", "TO")] == ["go ", "on ", "", "STA ", ""]
    assert stream.flush() == "STO"


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None, [])
    assert stream.push(5) == stream.flush() == ""


def test_an_id_that_the_vocabulary_lacks_has_no_text(story):
    settings = TokenizerSettings(added_tokens=(AddedToken("<end>", 4100),))
    tokenizer = SentencePieceTokenizer((story.path / "tokenizer.model").read_bytes(), settings)
    stream = TextStream(tokenizer, [])
    assert [stream.push(token) for token in (*tokenizer.encode("a hen"), 4098, 4100, 4200)][-3:] == ["", "<end>", ""]
    vocabulary = Vocabulary(tokenizer, 4200)
    assert [vocabulary.name(token) for token in (0, 4098, 4100, 4200)] == [b"<unk>", b"", b"<end>", b""]
