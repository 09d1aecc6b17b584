"""Requests of objects in S3 and what speaks its protocol, through s3fs.

Credentials, region and endpoint are those of botocore: the environment, ~/.aws, the role of the machine. fsspec's configuration
sets the rest, for example FSSPEC_S3_ANON=true for public buckets.
"""

import asyncio
from typing import Any, cast

import botocore.exceptions
from fsspec.asyn import sync as run_sync
from s3fs import S3FileSystem

from vitrail.data.remote.settings import read_settings
from vitrail.data.remote.transport import CHANGED, AccessError, Interrupted, Sink, Version, check_status, describe_stall
from vitrail.data.remote.urls import RemoteError

CHUNK_BYTES = 2**18
NO_CREDENTIALS = "no credentials: set AWS_PROFILE or AWS_ACCESS_KEY_ID …, or FSSPEC_S3_ANON=true"


class S3Transport:
    """One attempt of a request."""

    def __init__(self) -> None:
        self.timeout = read_settings().timeout
        limits = {"read_timeout": self.timeout, "connect_timeout": self.timeout, "retries": {"total_max_attempts": 1}}
        self.files = S3FileSystem(config_kwargs=limits, skip_instance_cache=True, use_listings_cache=False)
        self.files.retries = 1  # attempts are counted by `transport.retry`

    def read_version(self, url: str) -> Version:
        return cast(Version, run_sync(self.files.loop, self._read_version, url))

    def receive(self, url: str, version: Version, start: int, stop: int, sink: Sink) -> None:
        run_sync(self.files.loop, self._receive, url, version, start, stop, sink)

    def list_files(self, pattern: str) -> list[str]:
        """Return the objects that match a pattern, or those below a prefix that ends with a slash."""
        find = self.files.find if pattern.endswith("/") else self.files.glob
        try:
            return sorted(f"s3://{path}" for path in find(pattern))
        except Exception as error:
            raise explain(pattern, error, self.timeout) from None

    async def _call(self, url: str, method: str, **more: Any) -> Any:
        bucket, key, _ = self.files.split_path(url)
        if not bucket or not key:
            raise RemoteError(f"{url} names no object: write s3://BUCKET/KEY")
        try:
            return await self.files._call_s3(method, Bucket=bucket, Key=key, **more)
        except Exception as error:
            raise explain(url, error, self.timeout) from None

    async def _read_version(self, url: str) -> Version:
        head = await self._call(url, "head_object")
        return Version(int(head["ContentLength"]), head.get("ETag", ""), str(head.get("LastModified", "")))

    async def _receive(self, url: str, version: Version, start: int, stop: int, sink: Sink) -> None:
        condition = {"IfMatch": version.etag} if version.etag else {}
        found = await self._call(url, "get_object", Range=f"bytes={start}-{stop - 1}", **condition)
        body = found["Body"]
        try:
            version.check(url, None, found.get("ETag", ""), str(found.get("LastModified", "")))
            left = stop - start
            while left and (chunk := await body.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
                sink(chunk)
        except (TimeoutError, OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError) as error:
            raise explain(url, error, self.timeout) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("aiohttp", "aiobotocore"):
                raise
            raise Interrupted(f"the connection was lost ({type(error).__name__})") from None
        finally:
            body.close()
        if left:
            raise Interrupted(f"the connection was closed {left:,} bytes before the end")


def explain(url: str, error: BaseException, timeout: float) -> BaseException:
    """Return an error of the libraries in words: Interrupted if the request may be repeated, else RemoteError."""
    if isinstance(error, RemoteError | Interrupted):
        return error
    cause = error if isinstance(error, botocore.exceptions.ClientError) else error.__cause__
    if isinstance(cause, botocore.exceptions.ClientError):
        said: Any = cause.response
        status = int(said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status == 412:
            return RemoteError(f"{url} {CHANGED}: it has another ETag; start again")
        try:
            check_status(url, status, said.get("Error", {}).get("Code", ""))
        except (RemoteError, Interrupted) as found:
            return found
    found = [error, *([cause] if cause is not None else [])]
    if any(
        isinstance(each, botocore.exceptions.NoCredentialsError | botocore.exceptions.ProfileNotFound) for each in found
    ):
        return RemoteError(f"{url}: {NO_CREDENTIALS}")
    if isinstance(error, FileNotFoundError):
        return AccessError(f"{url}: not found")
    if isinstance(error, PermissionError):
        return AccessError(f"{url}: access denied: check the credentials")
    if any(isinstance(each, asyncio.TimeoutError | botocore.exceptions.ReadTimeoutError) for each in found):
        return Interrupted(describe_stall(timeout))
    if any(isinstance(each, botocore.exceptions.SSLError) for each in found):
        return RemoteError(f"{url}: no secure connection: check $AWS_CA_BUNDLE")
    if isinstance(error, OSError | botocore.exceptions.BotoCoreError | botocore.exceptions.HTTPClientError):
        return Interrupted(f"the connection was lost ({type(cause or error).__name__})")
    return error
