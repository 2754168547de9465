"""Conversations on the page of the server, in headless Chromium: what a person does with them, by pointer and keys."""

import json

import pytest
from chromium import check_readable, fill_in, needs_chromium
from helpers import chat_folder
from server_runs import RunningServer, until

pytestmark = needs_chromium
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ZONES = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": ZONES}}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "clock"}, "arguments": ZONES},
    "required": ["name", "arguments"],
}
ACTION = "document.querySelectorAll('.message')[%d].querySelectorAll('.actions button')"
TITLE = "#conversation-list [aria-current=true]"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = chat_folder(tmp_path_factory.mktemp("chats"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with RunningServer({"talker": folder}, settings={"cache_tokens": 2048}) as server:
        yield server


@pytest.fixture
def page(open_page):
    page = open_page()
    page.until("model !== null && view === 'chat'")
    fill_in(page, temperature=0, max_tokens=6)
    return page


def send(page, text):
    page.click("#chat-text")
    page.type(text)
    page.press("Enter")
    wait_for_reply(page)


def answer_with(page, pieces, held=False):
    """Replies are from now on these deltas of a stream. If `held`, they begin when the page calls `release()`."""
    events = [f"data: {json.dumps({'choices': [{'delta': piece}]})}\n\n" for piece in pieces]
    page.run(f"""window.released = new Promise((resolve) => (window.release = resolve));
    {"" if held else "release();"}
    window.fetch = async (_, {{signal}}) => new Response(new ReadableStream({{async start(control) {{
        signal.onabort = () => control.error(signal.reason);
        await released;
        if (signal.aborted) return;
        for (const event of {json.dumps([*events, "data: [DONE]" + chr(10) * 2])}) {{
            control.enqueue(new TextEncoder().encode(event));
        }}
        control.close();
    }}}}))""")


def wait_for_reply(page):
    page.until("!chatting && conversation.nodes[shownPath().at(-1)]?.role === 'assistant'")


def shown(page):
    return page.run("shownPath().map((at) => conversation.nodes[at].content)")


def push(page, message, button):
    """Press the button of this name below a message."""
    names = page.run(f"[...{ACTION % message}].map((each) => each.textContent)")
    page.click(f".message:nth-child({message + 1}) .actions button", names.index(button))


def change(page, text):
    """Write something else into the field that is edited."""
    page.run("document.activeElement.select()")
    page.type(text)


def test_what_does_nothing_yet_looks_so(browser, server):
    """While the server has not told its models, and while a reply is written."""
    page = browser.page(f"{server.url}/", first="window.real = fetch; window.fetch = () => new Promise(() => {})")
    opacity = "[...document.querySelectorAll('%s')].map((each) => getComputedStyle(each).opacity)"
    assert page.run(opacity % "#chat-send, #complete") == ["0.5", "0.5"]
    page.run("window.fetch = real; start()")
    page.until("model !== null")
    assert page.run(opacity % "#chat-send, #complete") == ["1", "1"]
    answer_with(page, [{"content": "word "}] * 5, held=True)
    page.click("#chat-text")
    page.type("Hello")
    page.press("Enter")
    assert set(page.run(opacity % ".actions button, #chat-new, .title")) == {"0.5"}
    page.run("release()")
    wait_for_reply(page)
    assert set(page.run(opacity % ".actions button, #chat-new, .title")) == {"1"}


def test_titles_and_deletion(page):
    send(page, "Hello")
    page.click("#chat-new")
    send(page, "Other")
    titles = "[...document.querySelectorAll('#conversation-list .title')].map((each) => each.textContent)"
    assert page.run(titles) == ["Other", "Hello"]
    page.click("#conversation-list button", 1)  # Rename
    assert page.run("document.activeElement.getAttribute('aria-label')") == "Title"
    change(page, "Weather")
    page.press("Escape")
    assert page.run(titles) == ["Other", "Hello"]
    page.click("#conversation-list button", 1)
    change(page, "Weather")
    page.press("Enter")
    assert page.run(titles) == ["Weather", "Hello"]
    assert page.run(f"document.activeElement.matches('{TITLE}')")
    page.reload()
    page.until("model !== null")
    assert page.run(titles) == ["Weather", "Hello"]
    page.click("#conversation-list button", 2)  # Delete
    assert page.run(titles) == ["Weather", "Hello"]  # it asks first
    page.click("#conversation-list button", 2)
    assert page.run(titles) == ["Hello"]
    assert page.run("Object.keys(localStorage).length") == 1
    page.click("#conversation-list .title")
    assert shown(page)[0] == "Hello"


def test_a_browser_that_stores_nothing(open_page):
    """As Chromium where cookies are blocked: each use of a storage is an error. The page forgets, but works."""
    refuse = "{get() { throw new DOMException('Access is denied', 'SecurityError'); }}"
    first = "".join(f"Object.defineProperty(window, '{each}Storage', {refuse});" for each in ("session", "local"))
    page = open_page(first=first)
    page.until("model !== null && view === 'chat'")
    fill_in(page, temperature=0, max_tokens=6)
    for text in ("Hello", "Again"):
        send(page, text)
        page.click("#chat-new")
    assert page.run("[...document.querySelectorAll('#conversation-list .title')].map((each) => each.textContent)") == [
        "Again",
        "Hello",
    ]
    page.click("#conversation-list button", 1)
    assert shown(page)[0] == "Hello"
    page.click("#conversation-list button", 3)  # Delete
    page.click("#conversation-list button", 3)
    assert page.run("keptConversations().map((each) => each.title)") == ["Again"]


def test_a_title_ends_with_a_whole_character(page):
    answer_with(page, [{"content": "x"}])
    send(page, "a" * 59 + "\U0001f407 ran")
    assert page.run("conversation.title") == "a" * 59 + "\U0001f407"


def test_two_tabs_lose_no_message(server, page):
    send(page, "Hello")
    other = page.second_tab(f"{server.url}/")
    other.until("model !== null && conversation.nodes.length === 2")
    fill_in(other, temperature=0, max_tokens=6)
    send(page, "From the first")
    other.until("conversation.nodes.length === 4 && document.querySelectorAll('.message').length === 4")
    send(other, "From the second")
    page.until("conversation.nodes.length === 6")
    assert shown(page)[::2] == ["Hello", "From the first", "From the second"]
    for each, words in ((page, "one "), (other, "two ")):
        answer_with(each, [{"content": words}] * 6, held=True)
        each.click("#chat-text")
        each.type(words)
        each.press("Enter")  # both at once: then there are two conversations
    for each in (page, other):
        each.run("release()")
        wait_for_reply(each)
    assert shown(page)[6:] + shown(other)[6:] == ["one", "one " * 6, "two", "two " * 6]
    kept = page.run("keptConversations().map(({ nodes }) => nodes.map(({ content }) => content))")
    assert [sum("one " * 6 in each for each in kept), sum("two " * 6 in each for each in kept)] == [1, 1]


def test_the_end_of_a_reply_leaves_the_focus_where_a_person_writes(page):
    answer_with(page, [{"content": "word "}] * 5, held=True)
    page.click("#chat-text")
    page.type("Hello")
    page.press("Enter")
    page.click("#system")
    page.type("Be b")
    page.run("release()")
    wait_for_reply(page)
    page.type("rief.")
    assert page.run("[$('system').value, $('chat-text').value]") == ["Be brief.", ""]


def test_results_wait_for_settings_that_are_right(page):
    answer_with(page, [{"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "clock", "arguments": "{}"}}]}])
    send(page, "Hello")
    fill_in(page, temperature=9)
    page.click("#messages form textarea")
    page.type("Five.")
    for _ in range(2):
        page.click("#messages form button")
    assert page.run("[conversation.nodes.length, document.activeElement.id]") == [2, "temperature"]


def test_another_reply_that_does_not_come_leaves_the_one_that_was_shown(page):
    send(page, "Hello")
    push(page, 1, "Another reply")
    page.until("!chatting && conversation.nodes.length === 3")
    push(page, 1, "‹")
    answer_with(page, [], held=True)
    push(page, 1, "Another reply")
    assert page.run("keptConversations()[0].chosen[0]") == 1  # what a reload shows
    page.click("#chat-stop")
    page.until("!chatting")
    assert page.run("shownPath()") == [0, 1]


def test_texts_from_right_to_left(page):
    """The mark at the end of a sentence is on its left."""
    answer_with(page, [{"content": "\u05e9\u05dc\u05d5\u05dd!\n\n- \u05e9\u05dc\u05d5\u05dd!"}])
    send(page, "\u05e9\u05dc\u05d5\u05dd!")
    lefts = """[...document.querySelectorAll('.user > .text, .assistant p')].map((element) => [0, 4].map((at) => {
        const range = document.createRange(), text = element.firstChild;
        range.setStart(text, at);
        range.setEnd(text, at + 1);
        return range.getBoundingClientRect().left;
    }))"""
    assert [first > last for first, last in page.run(lefts)] == [True] * 3
    list_, item = page.run(
        "['ul', 'li'].map((tag) => document.querySelector('.assistant ' + tag).getBoundingClientRect().right)"
    )
    assert list_ > item  # the bullet stands between them


def test_exports(page, tmp_path):
    page.click("#system")
    page.type("Be brief.\nAnd kind.")
    send(page, "Hello")
    page.keep_downloads(tmp_path)
    page.click("#export-json")
    page.click("#export-markdown")
    until(lambda: sorted(each.name for each in tmp_path.iterdir()) == ["conversation.json", "conversation.md"])
    exported = json.loads((tmp_path / "conversation.json").read_text())
    assert exported == page.run("conversation")
    reply = shown(page)[1]
    assert reply
    expected = f"# Hello\n\n> Be brief.\n> And kind.\n\n## You\n\nHello\n\n## talker\n\n{reply}\n\n"
    assert (tmp_path / "conversation.md").read_text() == expected


@pytest.mark.thorough
def test_edited_messages_are_branches(page):
    send(page, "Hello")
    before = shown(page)
    push(page, 0, "Edit")
    change(page, "Once upon a time")
    page.press("Enter")
    wait_for_reply(page)
    assert shown(page)[0] == "Once upon a time"
    assert page.text(".message:nth-child(1) .actions").split()[-2:] == ["‹", "2/2"]
    push(page, 0, "‹")
    assert shown(page) == before
    push(page, 1, "Edit")
    change(page, "Never")
    page.press("Escape")
    assert shown(page) == before
    push(page, 1, "Edit")
    change(page, "What I would have said.")
    page.press("Enter")
    assert shown(page) == ["Hello", "What I would have said."]  # it needs no reply
    send(page, "Go on")
    assert page.run("messagesTo(shownPath()[2]).map(({ content }) => content)") == [*shown(page)[:3]]


@pytest.mark.thorough
def test_tools_and_a_schema(page):
    """The schema asks for an object that is a call of the tool, which this model would not write by itself."""
    fill_in(page, max_tokens=60, tools="[{", schema="[]")
    page.click("#chat-text")
    page.type("What time is it?")
    page.press("Enter")
    page.until("document.activeElement.id === 'tools'")
    assert page.run("$('tools').validationMessage").startswith("Not JSON: ")
    change(page, json.dumps([CLOCK]))
    page.click("#chat-send")
    page.until("document.activeElement.id === 'schema'")
    assert page.run("$('schema').validationMessage") == "Expected an object."
    change(page, json.dumps(CALL))
    assert page.run("conversation.nodes.length") == 0  # the message is still in its field
    page.click("#chat-send")
    wait_for_reply(page)
    (call,) = page.run("conversation.nodes[1].calls")
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"])["zone"] in ("utc", "cet")
    assert "clock" in page.text(".message:nth-child(2) .code-head")
    push(page, 1, "Edit")  # the words around the call
    change(page, "I look.")
    page.press("Enter")
    assert page.run("[conversation.nodes[2].content, conversation.nodes[2].calls]") == ["I look.", [call]]
    for width in (320, 390, 1280, 1920):
        page.look(width)
        check_readable(page, width)
    page.look(1200)
    fill_in(page, schema="", max_tokens=6)
    page.click("form textarea[aria-label='Result of clock']")
    page.type("Five.")
    page.click("#messages form button")
    wait_for_reply(page)
    messages = page.run("messagesTo(shownPath().at(-1))")
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [call]
    assert (messages[2]["content"], messages[2]["tool_call_id"]) == ("Five.", call["id"])
    assert shown(page)[3]
    fill_in(page, tools="", schema=json.dumps(ZONES), max_tokens=60)
    send(page, "The zone?")
    assert json.loads(shown(page)[-1])["zone"] in ("utc", "cet")


@pytest.mark.thorough
def test_copies(page):
    send(page, "Hello")
    push(page, 1, "Copy")
    page.until(f"{ACTION % 1}[0].textContent === 'Copied'")
    assert page.pasted() == shown(page)[1]
    code = "for x in y:\n    pass\n"
    block = json.dumps(f"```python\n{code}```")
    page.run(f"showMarkdown($('messages').lastChild.querySelector('.text'), {block})")
    page.click(".code-head button")
    page.until("document.querySelector('.code-head button').textContent === 'Copied'")
    assert page.pasted() == code.rstrip("\n")


@pytest.mark.thorough
def test_the_keyboard_alone(page):
    """From the start of the page: a message, another reply, branches, an edit, settings, a title, the other views."""
    for _ in range(2):  # the first gives the focus to the document
        page.press("Tab")
    assert page.run("document.activeElement.id") == "skip"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "chat-text"
    page.type("Hello")
    page.press("Enter")
    wait_for_reply(page)
    assert page.run("document.activeElement.id") == "chat-text"
    page.press("Tab", shift=True)
    assert page.run("document.activeElement.textContent") == "Another reply"
    page.press("Enter")
    page.until("!chatting && conversation.nodes.length === 3")
    page.tab_to("[aria-label='Previous branch']", back=True)
    page.press("Enter")
    assert page.run("[shownPath().at(-1), document.activeElement.ariaLabel]") == [1, "Next branch"]
    page.tab_to(".assistant .actions button[aria-label=Edit]", back=True)
    page.press("Enter")
    change(page, "Changed")
    page.press("Enter")
    assert shown(page) == ["Hello", "Changed"]
    page.tab_to("#max_tokens", back=True)
    change(page, "3")
    page.tab_to("#temperature", back=True)
    page.tab_to("#system", back=True)
    page.type("Be brief.")
    page.tab_to("#conversation-list button[aria-label=Rename]", back=True)
    page.press("Enter")
    change(page, "Greetings")
    page.press("Enter")
    assert page.text(TITLE) == "Greetings"
    page.tab_to("#tab-chat", back=True)
    page.press("ArrowLeft")
    assert page.run("[view, document.activeElement.id]") == ["engine", "tab-engine"]
    page.until("!document.querySelector('#engine-live').hidden")
    page.tab_to("#steps")
    page.tab_to("#tab-engine", back=True)
    page.press("ArrowLeft")
    page.tab_to("#prompt")
    page.tab_to("#complete")
    page.press("Enter")
    page.until("!completing && tokens.length === 3")
    page.tab_to(".token")
    page.press("ArrowRight")
    page.press("Enter")
    page.tab_to("#bars button")
    page.press("Enter")
    page.until("!completing && $('prompt').value !== 'Once upon a time'")
    page.tab_to("#tab-completion", back=True)
    page.press("ArrowLeft")
    page.tab_to("#chat-new")
    page.press("Enter")
    assert page.run("[document.activeElement.id, conversation.nodes.length]") == ["chat-text", 0]
    page.tab_to("#conversation-list .title", back=True)
    page.press("Enter")
    assert page.run(f"document.activeElement.matches('{TITLE}')")
    page.tab_to("#conversation-list button[aria-label=Delete]")
    page.press("Enter")
    assert page.run("document.activeElement.ariaLabel") == "Really delete it?"
    page.press("Enter")
    assert page.run("[document.activeElement.id, localStorage.length]") == ["chat-new", 0]
