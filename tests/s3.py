"""An S3 server on this host, in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.ranks import free_port

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[Mapping[str, str]]:
    """One bucket; the environment in which clients find it. Skips the test where s3fs or moto is not installed."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    import boto3

    port = free_port()
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    s3fs.S3FileSystem.clear_instance_cache()  # those of another server, which has gone
    url = f"http://127.0.0.1:{port}"
    boto3.client("s3", "us-east-1", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b").create_bucket(Bucket=BUCKET)
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url,
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "2",
        }  # fmt: skip
    finally:
        running.stop()
        s3fs.S3FileSystem.clear_instance_cache()
