"""hf://: a repository of the Hub, or a directory or file in it, at the commit that its revision has now.

`huggingface_hub` lists, authorises and finds out where the files lie. The bytes are read here: its own download begins
a file anew when the process that fetched it has died.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal

import httpx2
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from luthier.errors import first_line
from luthier.jobs.initializers.web import of_status
from luthier.jobs.storage import Access, BrokenError, Entry, Place, StorageError, told

RepoType = Literal["dataset", "model"]


class Hub:
    """Names of files are those in the repository: what hf://owner/name/data has lies in `data/`, as with Kubeflow."""

    def __init__(self, place: Place, access: Access, repo_type: RepoType) -> None:
        self.place = place
        self.repo_type: RepoType = place.repo_type or repo_type
        self.revision = place.revision or constants.DEFAULT_REVISION
        self._token = access.token
        self.api = HfApi(token=access.token, library_name="luthier")

    def entries(self) -> list[Entry]:
        repo, kind = self.place.repo, self.repo_type
        with self.told():
            if (commit := self.api.repo_info(repo, repo_type=kind, revision=self.revision).sha) is None:
                raise BrokenError("the Hub does not say which commit it has")
            self.revision = commit
            found: list[RepoFile | RepoFolder] = []
            if self.place.path:
                found = self.api.get_paths_info(repo, [self.place.path], repo_type=kind, revision=commit)
                if not found:
                    raise StorageError("the repository has no such file or directory", where=self.place.uri)
            if not found or isinstance(found[0], RepoFolder):
                path = self.place.path or None
                found = list(self.api.list_repo_tree(repo, path, recursive=True, repo_type=kind, revision=commit))
        return [_entry(file) for file in found if isinstance(file, RepoFile)]

    def read(self, entry: Entry, start: int) -> Iterator[bytes | Literal["from the start"]]:
        url = hf_hub_url(
            self.place.repo, entry.key, repo_type=self.repo_type, revision=self.revision, endpoint=self.api.endpoint
        )
        headers = build_hf_headers(token=self._token, library_name="luthier") | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            self.told(),
            get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            if start and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                yield "from the start"
            yield from response.iter_raw()

    def binding(self, entry: Entry) -> bool:
        return True

    def told(self) -> AbstractContextManager[None]:
        """Within, errors of `huggingface_hub` and of what it stands on become those of storage."""
        raised = httpx2.HTTPError, httpx2.InvalidURL, EntryNotFoundError, ValueError, RuntimeError
        return told(self.place, *raised, explain=self._explain)

    def _explain(self, error: Exception) -> Exception | None:
        """What an error of `huggingface_hub` means."""
        what = "data set" if self.repo_type == "dataset" else "model"
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            return self._explain(error.__cause__)  # what an upload wraps its errors in
        match error:
            case GatedRepoError():
                remedy = "ask for access on its page, and set ACCESS_TOKEN"
                return StorageError(
                    f"the {what} is open only to those it has let in", where=self.place.uri, remedy=remedy
                )
            case RevisionNotFoundError():
                return StorageError(f"the {what} has no revision {self.revision!r}", where=self.place.uri)
            case RepositoryNotFoundError() | HFValidationError():
                remedy = "check the spelling; a private one needs ACCESS_TOKEN"
                return StorageError(f"the Hub has no such {what}", where=self.place.uri, remedy=remedy)
            case OfflineModeIsEnabled():
                remedy = "unset it, or name a file:// or s3:// place"
                return StorageError(
                    "HF_HUB_OFFLINE is set, so the Hub is not asked", where=self.place.uri, remedy=remedy
                )
            case EntryNotFoundError():
                return StorageError("the repository has no such file or directory", where=self.place.uri)
            case HfHubHTTPError():
                return of_status(self.place, error.response.status_code)
            case httpx2.TransportError():
                return BrokenError(first_line(error))
            case ValueError():  # of what is pushed: a README whose head it does not take
                return StorageError(f"the Hub refuses: {first_line(error)}", where=self.place.uri)
        return None


def _entry(file: RepoFile) -> Entry:
    if file.lfs is not None:
        return Entry(file.path, file.path, file.lfs.size, ("sha256", file.lfs.sha256), file.lfs.sha256)
    return Entry(file.path, file.path, file.size, ("git", file.blob_id), file.blob_id)
