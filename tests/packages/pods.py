"""A pod without its kubelet: the containers of a rendered DaemonSet, with folders of a machine in place of a node's.

What a manifest gives is taken from it: users, capabilities, arguments, environment, mounts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.packages.charts import Document, one
from tests.packages.containers import Container, Volume
from tests.packages.images import Image

POD_IP = "127.0.0.1"


@dataclass(frozen=True)
class Pod:
    """A pod of a release on the image's machine. `secrets`: the files of each; `folder`: the node's, below the shared one."""

    image: Image
    documents: list[Document]
    secrets: Mapping[str, Mapping[str, bytes]]
    folder: str

    @property
    def spec(self) -> Document:
        """The template of the pod."""
        spec: Document = one(self.documents, "DaemonSet")["spec"]["template"]["spec"]
        return spec

    def container(self, name: str) -> Container:
        """A container of the image, as the manifest has it."""
        spec = self.spec
        found = next(each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == name)
        security = spec["securityContext"] | found["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        environment = {pair["name"]: self._value(pair) for pair in found.get("env", [])}
        words = [_expanded(word, environment) for word in found.get("args", [])]
        return Container(
            self.image,
            found.get("command", self.image.entry) + words,
            security["runAsUser"],
            security["runAsGroup"],
            volumes=[
                Volume(self._source(volumes[mount["name"]]), mount["mountPath"], mount.get("readOnly", False))
                for mount in found["volumeMounts"]
            ],
            environment=environment,
            capabilities=security["capabilities"].get("add", []),
        )

    def _value(self, pair: Mapping[str, Any]) -> str:
        known = {"status.podIP": POD_IP, "metadata.name": "kvpool-abcde"}
        return str(pair["value"]) if "value" in pair else known[pair["valueFrom"]["fieldRef"]["fieldPath"]]

    def _source(self, volume: Document) -> str:
        """A folder of the machine with what the kubelet would put there; root's, as the kubelet makes them."""
        name = volume["name"]
        if "hostPath" in volume:
            path = f"{self.folder}{volume['hostPath']['path']}"
            must_exist = volume["hostPath"]["type"] == "Directory"
            self._made(path, 0o755, must_exist=must_exist)
            return f"/packages/{path}"
        path = f"{self.folder}/volumes/{name}"
        if "configMap" in volume:
            data = one(self.documents, "ConfigMap", volume["configMap"]["name"])["data"]
            files, mode = {key: text.encode() for key, text in data.items()}, 0o644
        elif "secret" in volume:
            files, mode = dict(self.secrets[volume["secret"]["secretName"]]), volume["secret"]["defaultMode"]
        else:
            assert "emptyDir" in volume, f"{name} is not known here"
            files, mode = {}, 0
        made = self._made(path, 0o755 if files else 0o777)
        for key, content in files.items():
            (made / key).write_bytes(content)
            (made / key).chmod(mode)
        return f"/packages/{path}"

    def _made(self, path: str, mode: int, *, must_exist: bool = False) -> Path:
        made = self.image.machine.shared / path
        if not made.exists():
            assert not must_exist, f"{path} is no directory of the node"
            made.mkdir(parents=True)
            made.chmod(mode)
        return made


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: environment[found.group(1)], word)
