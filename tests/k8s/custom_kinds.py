"""Checks objects of custom kinds against the types and schemas that npm packages have of them: `make k8s-check`.

`python -m tests.k8s.custom_kinds FOLDER`, where FOLDER has the packages. TypeScript refuses fields that a kind does not
have and values of another type; then the packages' own validators check patterns, bounds and what is required. That
both refuse something is tried too, on objects that are wrong on purpose.
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.k8s.rendering import ALTERNATIVES, OVERLAYS, Manifest, all_together, overlay

PACKAGES: Final = {
    "cert-manager.io/v1": "cert-manager",
    "gateway.networking.k8s.io/v1": "gateway-api",
    "keda.sh/v1alpha1": "keda",
    "monitoring.coreos.com/v1": "prometheus-operator",
}
"""Packages of the scope @kubernetes-models, by the API version that they describe."""
_FIRST_LINE: Final = 3
"""Line of a program on which its first object is made; the others follow on every other line."""
_OPTIONS: Final = {
    "compilerOptions": {
        "target": "es2022",
        "module": "nodenext",
        "strict": True,
        "skipLibCheck": True,
        "types": [],
        "outDir": "checked",
    },
    "files": ["checked.mts"],
}


def custom(objects: Sequence[Manifest]) -> list[Manifest]:
    """Returns the objects of custom kinds, each once."""
    found = {json.dumps(item): item for item in objects if item["apiVersion"] in PACKAGES}
    return list(found.values())


def program(objects: Sequence[Manifest]) -> str:
    """Returns a program of TypeScript that makes each object and validates it."""
    lines = ["const problems: string[] = [];"]
    for number, item in enumerate(objects):
        place = f"@kubernetes-models/{PACKAGES[item['apiVersion']]}/{item['apiVersion']}"
        data = json.dumps({key: value for key, value in item.items() if key not in ("apiVersion", "kind")})
        name = json.dumps(f"{item['kind']}/{item['metadata']['name']}: ")
        lines += [
            f'import {{ {item["kind"]} as Kind{number} }} from "{place}";',
            f"try {{ new Kind{number}({data}).validate(); }} catch (error) {{ problems.push({name} + error); }}",
        ]
    lines.append("if (problems.length) throw new Error(problems.join('\\n'));")
    return "\n".join(lines) + "\n"


def problems(objects: Sequence[Manifest], folder: Path) -> str:
    """Returns what is wrong with objects; empty where nothing is."""
    (folder / "checked.mts").write_text(program(objects))
    (folder / "tsconfig.json").write_text(json.dumps(_OPTIONS))
    for command in (["node", "node_modules/typescript/bin/tsc"], ["node", "checked/checked.mjs"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def wrong(objects: Sequence[Manifest]) -> list[Manifest]:
    """Returns objects that are wrong on purpose: with a field that is unknown, and with a value of another type."""
    made = []
    for kind in ("Certificate", "GRPCRoute", "PodMonitor", "ScaledObject"):
        right = next(item for item in objects if item["kind"] == kind)
        for field in ("notAField", sorted(right["spec"])[0]):
            item = copy.deepcopy(right)
            item["spec"][field] = 5
            made.append(item)
    return made


def check_the_check(objects: Sequence[Manifest], folder: Path) -> None:
    """Asserts that what is wrong is found: by TypeScript, and by a validator, which alone has patterns."""
    made = wrong(objects)
    found = problems(made, folder)
    lines = {int(line) for line in re.findall(r"^checked\.mts\((\d+),", found, re.MULTILINE)}
    assert lines == {_FIRST_LINE + 2 * number for number in range(len(made))}, found
    route = copy.deepcopy(next(item for item in objects if item["kind"] == "HTTPRoute"))
    route["spec"]["hostnames"] = ["Not A Host"]
    assert "hostnames" in problems([route], folder)


def main() -> None:
    """Check all custom objects; exit with the problems if there are any."""
    folder = Path(sys.argv[1])
    whole = [*map(overlay, OVERLAYS), *map(all_together, ALTERNATIVES)]
    objects = custom([item for rendered in whole for item in rendered])
    if found := problems(objects, folder):
        sys.exit(found)
    check_the_check(objects, folder)
    kinds = sorted({item["kind"] for item in objects})
    print(f"{len(objects)} objects are valid: {', '.join(kinds)}")


if __name__ == "__main__":
    main()
