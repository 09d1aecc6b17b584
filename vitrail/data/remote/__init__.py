"""Remote files, http(s):// and s3://: addresses, requests with retries, a bounded cache of blocks, shards and their indices."""
