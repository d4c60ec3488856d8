"""The page of the gRPC contracts, from the comments of the files in proto/."""

import importlib.resources
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

_ROOT: Final = Path(__file__).parents[1]
_FILES: Final = ("generation", "tokens", "worker", "target", "draft")
_TOP: Final = """\
# gRPC

The contracts between clients and services are in `proto/outrider/v1`; this page is made of their comments.
Clients call [GenerationService](#generationservice) at an orchestrator; targets and drafts are called by orchestrators
only. Errors have a `google.rpc.ErrorInfo` with a reason and its fields, which the Python client raises as
[exceptions](python-reference.md#errors).
"""

Path_ = tuple[int, ...]
"""Place of an element within a file, as protoc has it: field numbers and indexes in turn."""


class _Writer:
    """Writes the sections of one file.

    Args:
        file: with source information.
        anchors: sections of the page, by full name of a message or enum.
    """

    def __init__(self, file: FileDescriptorProto, anchors: Mapping[str, str]) -> None:
        self._file = file
        self._anchors = anchors
        self._comments = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in file.source_code_info.location
        }

    def sections(self) -> Iterator[str]:
        """Yield the file's services, messages and enums as Markdown."""
        yield f"## {self._file.name.removeprefix('outrider/v1/')}\n"
        # The comment in front of `syntax` is the file's.
        yield self._comment((12,)) + "\n"
        for number, service in enumerate(self._file.service):
            yield from self._service(service, (6, number))
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (4, number), "")
        for number, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (5, number), "")

    def _service(self, service: ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {service.name}\n\n{self._comment(path)}\n"
        rows = []
        for number, method in enumerate(service.method):
            request = f"{'stream ' * method.client_streaming}{self._link(method.input_type)}"
            response = f"{'stream ' * method.server_streaming}{self._link(method.output_type)}"
            rows.append((f"`{method.name}`", request, response, self._comment((*path, 2, number))))
        yield _table(("call", "request", "response", "meaning"), rows)

    def _message(self, message: DescriptorProto, path: Path_, outer: str) -> Iterator[str]:
        if message.options.map_entry:
            return
        name = f"{outer}{message.name}"
        yield f"### {name}\n\n{self._comment(path)}\n"
        rows = []
        for number, field in enumerate(message.field):
            kind = self._type(field, message)
            rows.append((f"`{field.name}`", str(field.number), kind, self._comment((*path, 2, number))))
        if rows:
            yield _table(("field", "no.", "type", "meaning"), rows)
        for number, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, 3, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, 4, number), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: Path_, outer: str) -> Iterator[str]:
        yield f"### {outer}{enum.name}\n\n{self._comment(path)}\n"
        rows = [
            (f"`{value.name}`", str(value.number), self._comment((*path, 2, number)))
            for number, value in enumerate(enum.value)
        ]
        yield _table(("value", "no.", "meaning"), rows)

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entries = {f".{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
        for suffix, entry in entries.items():
            if field.type_name.endswith(f".{message.name}{suffix}"):
                key, value = (self._scalar(item) for item in entry.field)
                return f"map of {key} to {value}"
        kind = self._scalar(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        if field.proto3_optional:
            return f"optional {kind}"
        if field.HasField("oneof_index"):
            return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return kind

    def _scalar(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _link(self, full_name: str) -> str:
        anchor = self._anchors.get(full_name)
        name = full_name.removeprefix(".outrider.v1.").removeprefix(".google.protobuf.")
        return f"[{name}](#{anchor})" if anchor else name

    def _comment(self, path: Path_) -> str:
        return " ".join(self._comments.get(path, "").split()).replace("|", "\\|")


def page() -> str:
    """Return the page as Markdown."""
    described = {Path(file.name).stem: file for file in _described().file}
    if set(described) != set(_FILES):
        raise ValueError(f"the page lists {sorted(_FILES)}, proto/ has {sorted(described)}")
    files = [described[name] for name in _FILES]
    anchors = dict(_anchors(files))
    return "\n".join([_TOP, *(section for file in files for section in _Writer(file, anchors).sections())])


def _described() -> FileDescriptorSet:
    """Return the descriptors of proto/, with their comments."""
    protos = sorted(str(path.relative_to(_ROOT / "proto")) for path in (_ROOT / "proto").rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.NamedTemporaryFile() as output:
        options = ["--include_source_info", f"--descriptor_set_out={output.name}"]
        if protoc.main(["protoc", f"-I{_ROOT / 'proto'}", f"-I{well_known}", *options, *protos]) != 0:
            raise RuntimeError("protoc failed; its messages stand above")
        return FileDescriptorSet.FromString(output.read())


def _anchors(files: Sequence[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    for file in files:
        names = [enum.name for enum in file.enum_type]
        for message in file.message_type:
            inner = [item.name for item in message.nested_type] + [item.name for item in message.enum_type]
            names += [message.name, *(f"{message.name}.{name}" for name in inner)]
        for name in names:
            yield f".{file.package}.{name}", name.replace(".", "").lower()


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
