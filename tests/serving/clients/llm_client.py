"""`llm`: its OpenAI models with another base, asked and as a stream."""

import os
import tempfile
from pathlib import Path

home = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: talker\n  model_name: talker\n  api_base: {os.environ['SERVER']}/v1\n  api_key_name: none\n"
    "  supports_schema: true\n"
)
(home / "keys.json").write_text('{"none": "any"}')

import json  # noqa: E402

import llm  # noqa: E402

model = llm.get_model("talker")
asked = {"max_tokens": 8, "temperature": 0}
whole = model.prompt("Hello", stream=False, **asked).text()
assert whole
assert "".join(model.prompt("Hello", **asked)) == whole
schema = {"type": "object", "properties": {"zone": {"enum": ["utc"]}}, "required": ["zone"]}
schema["additionalProperties"] = False
assert json.loads(model.prompt("Hello", schema=schema, max_tokens=60).text()) == {"zone": "utc"}
