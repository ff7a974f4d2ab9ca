"""Messages to the text and the ids of a prompt: the three formats of the field, and the sandbox."""

import json
import re
from pathlib import Path

import pytest
from vocabularies import (
    copy_llama2_style,
    write_byte_fallback,
    write_byte_level,
    write_json,
    write_sentencepiece,
)

from lookahead.errors import InputError
from lookahead.tokenizer import Tokenizer

CHATML = """\
{% if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
{% endif %}
{% for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""
LLAMA2 = """\
{% set turns = messages %}
{% set preface = '' %}
{% if messages[0].role == 'system' %}
    {% set turns = messages[1:] %}
    {% set preface = '<<SYS>>\\n' + messages[0].content.strip() + '\\n<</SYS>>\\n\\n' %}
{% endif %}
{% for turn in turns %}
    {% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns,\\nthe user first') }}
    {% elif turn.role == 'user' %}
        {{- bos_token + '[INST] ' + (preface if loop.first else '') + turn.content.strip() -}}
        {{- ' [/INST]' -}}
    {% else %}
        {{- ' ' + turn.content.strip() + ' ' + eos_token -}}
    {% endif %}
{% endfor %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": " What is 2 < 3 & 'x'? 🙂\n"},
    {"role": "assistant", "content": "Vrai."},
    {"role": "user", "content": "Thanks"},
]
CHATML_TEXT = (
    "<|im_start|>system\nAnswer in French.<|im_end|>\n"
    "<|im_start|>user\n What is 2 < 3 & 'x'? 🙂\n<|im_end|>\n"
    "<|im_start|>assistant\nVrai.<|im_end|>\n"
    "<|im_start|>user\nThanks<|im_end|>\n"
    "<|im_start|>assistant\n"
)
LLAMA2_TEXT = (
    "<s>[INST] <<SYS>>\nAnswer in French.\n<</SYS>>\n\nWhat is 2 < 3 & 'x'? 🙂 [/INST]"
    " Vrai. </s><s>[INST] Thanks [/INST]"
)
LLAMA3_TEXT = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nAnswer in French.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 < 3 & 'x'? 🙂<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nVrai.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nThanks<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


def with_template(directory: Path, template: object) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "chat_template": template})
    return Tokenizer.load(directory)


def rendered(directory: Path, template: str) -> str:
    return with_template(write_sentencepiece(directory), template).render_chat(MESSAGES)


def refusal(directory: Path, template: str) -> str:
    tokenizer = with_template(write_sentencepiece(directory), template)
    assert tokenizer.has_chat_template
    with pytest.raises(InputError) as caught:
        tokenizer.render_chat(MESSAGES)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory / "tokenizer_config.json") in message
    return message


@pytest.mark.parametrize(
    ("write", "template", "text"),
    [
        (write_byte_level, CHATML, CHATML_TEXT),
        (write_byte_level, LLAMA3, LLAMA3_TEXT),
        (write_byte_fallback, LLAMA2, LLAMA2_TEXT),
    ],
    ids=["ChatML", "Llama 3", "Llama 2"],
)
def test_the_three_formats(write, template, text, tmp_path):
    ours = with_template(write(tmp_path), template)
    assert ours.has_chat_template
    assert ours.render_chat(MESSAGES) == text
    ids = ours.chat_ids(MESSAGES)
    starts = ("<|begin_of_text|>", "<s>")
    assert ids.count(ours.bos_token_id) == sum(text.count(start) for start in starts)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == expected
    assert ids == theirs.encode(text, add_special_tokens=False)


def test_ids_of_the_llama_2_format_from_a_real_tokenizer_model(tmp_path):
    tokenizer = with_template(copy_llama2_style(tmp_path), LLAMA2)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "hi"},
    ]
    assert tokenizer.render_chat(messages) == "<s>[INST] hi [/INST] yo </s><s>[INST] hi [/INST]"
    prompt = [1, 733, 16289, 28793, 12014, 733, 28748, 16289, 28793]
    answer = [tokenizer.token_to_id("▁yo"), tokenizer.token_to_id("▁"), 2]
    assert tokenizer.chat_ids(messages) == [*prompt, *answer, *prompt]
    assert tokenizer.chat_ids(messages[:1]) == prompt


def test_a_system_prompt_of_the_template_itself(tmp_path):
    tokenizer = with_template(write_byte_level(tmp_path), CHATML)
    assert tokenizer.render_chat(MESSAGES[3:]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )


def test_where_a_template_is_looked_for(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    assert with_template(write_sentencepiece(tmp_path), named).render_chat(MESSAGES) == "listed"
    assert with_template(tmp_path, "config").render_chat(MESSAGES) == "config"
    (tmp_path / "chat_template.jinja").write_text("file é\n", encoding="utf-8")
    assert with_template(tmp_path, "config").render_chat(MESSAGES) == "file é"


@pytest.mark.parametrize("template", [None, [], [{"name": "tool_use", "template": "tools"}]])
def test_a_checkpoint_without_a_template_says_what_to_do(template, tmp_path):
    tokenizer = with_template(write_sentencepiece(tmp_path), template)
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match=r"^a chat needs a chat template and .*none") as caught:
        tokenizer.chat_ids(MESSAGES)
    message = str(caught.value)
    for part in (str(tmp_path), "chat_template.jinja", "tokenizer_config.json", "without --chat"):
        assert part in message
    assert "\n" not in message


def test_what_a_template_may_use(tmp_path):
    template = (
        "{%- for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ message.role }}{% endgeneration %}|{% endfor %}"
        "{{ {'html': '<b> & é', 'n': [1]} | tojson }}{{ [1, 2] | tojson(indent=1) }}|"
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}|{{ tools is none }}"
    )
    assert rendered(tmp_path, template) == (
        'system|user|{"html": "<b> & é", "n": [1]}[\n 1,\n 2\n]|<s></s><unk>|True'
    )


def test_the_date(tmp_path):
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", rendered(tmp_path, "{{ strftime_now('%Y-%m-%d') }}"))


def test_block_lines_leave_no_white_space(tmp_path):
    assert rendered(tmp_path, "a\n    {% if true %}\n b\n  {% endif %}\nc\n") == "a\n b\nc"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__.keys() }}",
        "{{ raise_exception.__code__.co_code.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template, tmp_path):
    message = refusal(tmp_path, template)
    assert "unsafe" in message or "not safely callable" in message


def test_a_template_that_refuses_the_messages(tmp_path):
    tokenizer = with_template(write_sentencepiece(tmp_path), LLAMA2)
    with pytest.raises(InputError) as caught:
        tokenizer.render_chat(MESSAGES[2:])
    assert "refused the messages: user and assistant must take turns, the user first;" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n{% if %}", "not valid, line 2"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{% include 'file' %}", "TypeError: no loader"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
    ],
)
def test_a_broken_template_is_wrong_input(template, said, tmp_path):
    assert said in refusal(tmp_path, template)


def test_a_chat_needs_messages(tmp_path):
    with pytest.raises(InputError, match="no messages"):
        with_template(write_sentencepiece(tmp_path), CHATML).render_chat([])
