"""Response templates in the forms that checkpoints give them, and chat templates with and without tools."""

from typing import Any

CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
QWEN: dict[str, Any] = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": CALL,
        },
    },
}
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
GEMMA: dict[str, Any] = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "content": {"close": "<turn|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LIST: dict[str, Any] = {
    "start_anchor_pattern": r"<\|TURN\|>(?:CHATBOT|BOT)",
    "fields": {
        "reasoning": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
    },
}
PYTHON: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
    },
}
XML: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>",
                "merge_duplicates": True,
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LINES: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "content": {"repeats": True, "join": " + "},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)\n",
            "close": ["END", "END OF CALL"],
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "int"}},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "As <tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}<think>\n{% endif %}{% endif %}"
)
