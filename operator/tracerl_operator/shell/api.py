"""The API server through the official client's asyncio transport: a few requests, on plain documents.

The generated models are not used: documents go in and come out as they are, and nothing is logged of them.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlencode

import aiohttp
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from tracerl_operator import names
from tracerl_operator.shell.kinds import BY_NAME, SECRET, Kind, version
from tracerl_operator.types import Document, Inquiry, Propagation

REQUEST_SECONDS = 30
CHUNK = 25
"""Objects of a list that are read at once; each may have more than a megabyte."""
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_RETRIED = frozenset({401, 408, 409, 429})
_REFUSALS = ("failed to create typed patch object", "failed calling webhook")
"""Of answers 500: a field that the schema lacks, and a webhook that does not answer. Somebody has to act."""

Count = Callable[[str, str, int], None]
"""Takes verb, kind and code of a request; code 0 where no answer came."""


class ApiError(Exception):
    """An answer that is none of success; `code` 0 where no answer came."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def passes(self) -> bool:
        """Whether it may go well the next time although nobody changed anything."""
        if self.code == 500 and any(text in str(self) for text in _REFUSALS):
            return False
        return self.code == 0 or self.code >= 500 or self.code in _RETRIED


class NoClusterError(Exception):
    """There is no cluster to talk to; the message is a sentence for whoever started the operator."""


async def load_configuration() -> Configuration:
    """Find the cluster as the official client does: the pod's account, else KUBECONFIG."""
    configuration = type.__call__(Configuration)
    try:
        load_incluster_config(client_configuration=configuration)
    except ConfigException:
        pass
    else:
        return configuration
    try:
        await load_kube_config(client_configuration=configuration)
    except (ConfigException, OSError, yaml.YAMLError) as error:
        raise NoClusterError(f"no cluster to talk to: {error}; set KUBECONFIG, or run in a pod") from error
    return configuration


def tls(configuration: Configuration) -> ssl.SSLContext:
    """Give the TLS context of a configuration, for connections that the client does not make."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class Api:
    """Requests to the API server. All raise `ApiError`."""

    def __init__(self, configuration: Configuration, count: Count) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self._count = count

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        """Read an object; None where there is none. Of a Secret, only the metadata."""
        accept = _METADATA if kind is SECRET else "application/json"
        try:
            return await self._request("GET", kind, kind.path(namespace, name), accept=accept)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def namespace_labels(self, name: str) -> Document:
        """Read the labels of a namespace; none where they may not be read."""
        try:
            answer = await self._request("GET", _NAMESPACE, _NAMESPACE.path(None, name), accept=_METADATA)
        except ApiError as error:
            if error.code in (403, 404):
                return {}
            raise
        labels = answer["metadata"].get("labels")
        return labels if isinstance(labels, dict) else {}

    async def list_all(self, kind: Kind, namespace: str | None) -> AsyncIterator[tuple[list[Document], int]]:
        """Go over all objects that are the operator's business, in chunks, each with the list's version."""
        query = {"limit": str(CHUNK)}
        if kind.selector is not None:
            query["labelSelector"] = kind.selector
        while True:
            answer = await self._request("LIST", kind, kind.path(namespace), query)
            yield _items(kind, answer), version(answer)
            more = answer["metadata"].get("continue")
            if not more:
                return
            query["continue"] = more

    async def ask(self, namespace: str, inquiry: Inquiry) -> list[Document]:
        """List what an inquiry asks for, a hundred objects at most."""
        kind = BY_NAME[inquiry.api_version, inquiry.kind]
        query = {"limit": "100"}
        if inquiry.fields:
            query["fieldSelector"] = inquiry.fields
        if inquiry.labels:
            query["labelSelector"] = inquiry.labels
        return _items(kind, await self._request("LIST", kind, kind.path(namespace), query))

    async def served(self, kind: Kind) -> bool:
        """Say whether the cluster has a kind."""
        try:
            answer = await self._request("GET", _DISCOVERY, kind.root)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in answer["resources"])

    async def apply(self, kind: Kind, namespace: str, document: Document) -> Document:
        """Apply on the server's side, as the one field manager of all that the operator writes."""
        path = kind.path(namespace, document["metadata"]["name"])
        query = {"fieldManager": names.MANAGER, "force": "true"}
        accept = _METADATA if kind is SECRET else "application/json"
        media = "application/apply-patch+yaml"
        return await self._request("APPLY", kind, path, query, document, media=media, accept=accept)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, propagation: Propagation
    ) -> Document | None:
        """Delete the object with this UID; nothing happens where it is gone or another one has its name."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            "preconditions": {"uid": uid},
        }
        try:
            return await self._request("DELETE", kind, kind.path(namespace, name), body=body)
        except ApiError as error:
            if error.code in (404, 409):
                return None
            raise

    async def write_status(self, kind: Kind, document: Document, status: Document) -> Document:
        """Replace the status of an object, if it still is the very version that `document` is (else 409)."""
        metadata = document["metadata"]
        body = [
            {"op": "replace", "path": f"/metadata/{key}", "value": metadata[key]}
            for key in ("uid", "resourceVersion")
        ]
        body.append({"op": "add", "path": "/status", "value": status})
        path = kind.path(metadata["namespace"], metadata["name"], "/status")
        query = {"fieldManager": names.MANAGER}
        media = "application/json-patch+json"
        return await self._request("PATCH", kind, path, query, body, media=media)

    async def create(self, kind: Kind, namespace: str, document: Document) -> Document:
        """Create an object."""
        return await self._request("CREATE", kind, kind.path(namespace), body=document)

    async def merge(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """Change an object of the operator's own by a merge patch."""
        media = "application/merge-patch+json"
        return await self._request("PATCH", kind, kind.path(namespace, name), body=change, media=media)

    async def update(self, kind: Kind, document: Document) -> Document:
        """Replace an object of the operator's own, if it still is this version (else 409)."""
        metadata = document["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("UPDATE", kind, path, body=document)

    async def _request(
        self,
        verb: str,
        kind: Kind,
        path: str,
        query: dict[str, str] | None = None,
        body: object = None,
        *,
        media: str = "application/json",
        accept: str = "application/json",
    ) -> Document:
        method = _METHODS.get(verb, verb)
        url = f"{self._configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        headers = {"Accept": accept, "Content-Type": media, "User-Agent": "tracerl-operator"}
        code = 0
        try:
            for setting in (await self._configuration.auth_settings()).values():
                headers[setting["key"]] = setting["value"]
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=REQUEST_SECONDS
            )
            code = answer.status
            return dict(json.loads(answer.data))
        except ApiException as error:
            code = error.status or 0
            raise ApiError(code, _message(error)) from None
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,
            RecursionError,
            ConfigException,
        ) as error:
            why = str(error) or "not in time"  # a timeout says nothing of itself
            host = self._configuration.host
            raise ApiError(0, f"no answer from {host} to {verb} {kind.name}: {why}") from None
        finally:
            self._count(verb, kind.name, code)


_NAMESPACE = Kind("v1", "Namespace", "namespaces", watched=False)
_DISCOVERY = Kind("v1", "APIResourceList", "", watched=False)
_METHODS = {"LIST": "GET", "APPLY": "PATCH", "CREATE": "POST", "UPDATE": "PUT"}


def _items(kind: Kind, answer: Document) -> list[Document]:
    # Items of a list do not say what they are.
    return [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in answer["items"]]


def _message(error: ApiException) -> str:
    """Read the server's sentence; what it echoes of the request stays out but for that."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        message = None
    return str(message or error.reason or f"code {error.status}")
