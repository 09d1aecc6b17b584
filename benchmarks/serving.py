"""Load test of the service against a baseline server with FastAPI, timm and a lock (benchmarks/plain_server.py).

    python benchmarks/serving.py                        throughput with 32 clients, then 64 clients for 60 s, then an overload
    python benchmarks/serving.py --rounds 3 --seconds 5 --load 10
    python benchmarks/serving.py --only plain vitrail

Servers are processes of their own and all run from the beginning; they are tested in turns, for some seconds each, by clients
that keep their connection and send the next request after each response. Clients run in this process, on the same cores as
the server. The images are the ImageNet samples (JPEGs of about 500 pixels), the model is DeiT-Ti. First, every server's top-1
predictions are compared with PyTorch's.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

SHARED = Path(__file__).parents[2] / "shared"
WEIGHTS, SAMPLES = SHARED / "weights" / "deit_tiny_patch16_224.safetensors", SHARED / "data" / "imagenet-samples"
SHARES = (0.5, 0.95, 0.99)
SERVERS: dict[str, list[str]] = {
    "plain": [],
    "vitrail": ["--runtime", "torch"],
    "vitrail, one worker": ["--runtime", "torch", "--workers", "1"],
    "vitrail merged": ["--runtime", "torch", "--merge", "R"],
    "vitrail auto": ["--runtime", "auto"],
    "vitrail auto merged": ["--runtime", "auto", "--merge", "R"],
}


class Server:
    """A server process."""

    def __init__(self, name: str, options: list[str], model: str = f"deit={WEIGHTS}") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        plain = [str(Path(__file__).parent / "plain_server.py"), str(self.port), str(WEIGHTS)]
        ours = ["-m", "vitrail", "serve", model, "--port", str(self.port), *options]
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, *(plain if name == "plain" else ours)], stdout=subprocess.DEVNULL
        )

    def wait(self, data: bytes) -> None:
        """Wait until the server responds."""
        end = time.monotonic() + 600
        while True:
            try:
                found = asyncio.run(ask([self.port], [data], clients=1, requests=1))
                if found.codes[200] == 1:
                    return
            except OSError:
                pass  # not listening yet
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"{self.name} does not respond")
            time.sleep(0.5)

    def resident(self) -> int:
        """Return the resident memory in bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@dataclass
class Found:
    """Results of the clients."""

    seconds: float = 0.0
    codes: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # of those that were answered
    labels: dict[int, str] = field(default_factory=dict)  # the first answer, by picture

    def at(self, share: float) -> float:
        """Return a quantile of the response times, in milliseconds."""
        waits = sorted(self.waits)
        return 1000 * waits[min(len(waits) - 1, int(share * len(waits)))] if waits else float("nan")

    def row(self) -> dict[str, Any]:
        made = {f"p{int(100 * share)}_ms": round(self.at(share), 1) for share in SHARES}
        codes = {str(code): count for code, count in sorted(self.codes.items())}
        return {"pictures_per_second": round(rate(self), 2), **made, "codes": codes}


async def ask(
    ports: list[int],
    pictures: list[bytes],
    clients: int,
    seconds: float = 1e9,
    requests: int = 10**9,
    patient: bool = False,
) -> Found:
    """Run clients that each send the next request after a response, for some time or a number of requests.

    Refused clients retry at once; patient clients wait for the time in Retry-After.
    """
    found, asked = Found(), iter(range(requests))
    begin = time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[number % len(ports)])
        for index in asked:
            if time.perf_counter() - begin > seconds:
                break
            data = pictures[index % len(pictures)]
            head = "POST /predict?top=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            sent = time.perf_counter()
            writer.write(head.encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            said = await reader.readexactly(int(headers["content-length"]))
            code = int(lines[0].split()[1])
            found.codes[code] += 1
            if code == 200:
                found.waits.append(time.perf_counter() - sent)
                told = json.loads(said)
                answers = told["answers"] if "answers" in told else told["predictions"][0]["answers"]
                found.labels[index] = str(answers[0]["label"])
            elif patient:
                await asyncio.sleep(float(headers.get("retry-after", 1)))
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    found.seconds = time.perf_counter() - begin
    return found


def true_answers() -> list[int]:
    """Return PyTorch's top-1 predictions for all samples, one image at a time."""
    import torch
    from PIL import Image

    import vitrail

    model = vitrail.load(WEIGHTS)
    with torch.inference_mode():
        return [
            int(model(model.preprocessing(Image.open(path))[None]).argmax()) for path in sorted(SAMPLES.glob("*.JPEG"))
        ]


def agreement(server: Server, pictures: list[bytes], truth: list[int]) -> int:
    """Return the number of images with the same top-1 prediction as PyTorch."""
    import vitrail

    labels = vitrail.load(WEIGHTS).labels or ()
    found = asyncio.run(ask([server.port], pictures, clients=8, requests=len(pictures)))
    assert found.codes == {200: len(pictures)}, found.codes
    right = 0
    for index, wanted in enumerate(truth):
        right += found.labels[index] in (str(wanted), *((labels[wanted],) if labels else ()))
    return right


def contest(
    only: list[str], rounds: int = 5, seconds: float = 15.0, clients: int = 32, load: float = 60.0, merge: int = 8
) -> list[dict[str, Any]]:
    """Compare all servers in turns, then load vitrail. Target: 1.5 times plain, with merging 2 times, at no worse p99."""
    if not WEIGHTS.exists() or not SAMPLES.exists():
        raise SystemExit(f"this needs {WEIGHTS} and {SAMPLES}")
    pictures = [path.read_bytes() for path in sorted(SAMPLES.glob("*.JPEG"))]
    truth = true_answers()
    servers = [Server(name, [str(merge) if word == "R" else word for word in SERVERS[name]]) for name in only]
    try:
        for server in servers:
            server.wait(pictures[0])
        same = {server.name: agreement(server, pictures, truth) for server in servers}
        heard: dict[str, list[Found]] = {server.name: [] for server in servers}
        for turn in range(rounds):
            for server in servers[turn % len(servers) :] + servers[: turn % len(servers)]:
                asyncio.run(ask([server.port], pictures, clients, requests=clients))  # warm again
                heard[server.name].append(asyncio.run(ask([server.port], pictures, clients, seconds)))
        print(f"{clients} clients, {rounds} turns of {seconds:g} s each, medians")
        rows = compared(heard, same, clients, len(pictures))
        return rows + (loaded(servers, pictures, load) if load else [])
    finally:
        for server in servers:
            server.stop()


def compared(heard: dict[str, list[Found]], same: dict[str, int], clients: int, pictures: int) -> list[dict[str, Any]]:
    """Print and return a row for each server."""
    plain = statistics.median(rate(found) for found in heard["plain"]) if "plain" in heard else float("nan")
    print(f"{'':22}{'images/s':>11}{'of plain':>10}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}   same top-1")
    rows = []
    for name, found in heard.items():
        speed = statistics.median(rate(each) for each in found)
        waits = {f"p{int(100 * share)}_ms": statistics.median(each.at(share) for each in found) for share in SHARES}
        told = "".join(f"{wait:9.0f}" for wait in waits.values())
        print(f"{name:22}{speed:11.1f}{speed / plain:10.2f}{told}   {same[name]}/{pictures}")
        rows.append(
            {
                "work": "serve",
                "server": name,
                "clients": clients,
                "pictures_per_second": round(speed, 2),
                "of_plain": round(speed / plain, 3),
                **{key: round(wait, 1) for key, wait in waits.items()},
                "refused": sum(count for each in found for code, count in each.codes.items() if code != 200),
                "same_top1": same[name],
                "pictures": pictures,
                "rounds": [each.row() for each in found],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds per server and round")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--load", type=float, default=60.0, help="seconds of the load test and of the overload; 0 skips both"
    )
    parser.add_argument("--merge", type=int, default=8, metavar="R", help="tokens merged per layer")
    parser.add_argument("--only", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    given = parser.parse_args()
    rows = contest(given.only, given.rounds, given.seconds, given.clients, given.load, given.merge)
    print(measure.save("serving", rows))


def rate(found: Found) -> float:
    return found.codes[200] / found.seconds


def loaded(servers: list[Server], pictures: list[bytes], seconds: float) -> list[dict[str, Any]]:
    """Test 64 clients within the capacity, and four times as many clients as a short queue holds."""
    rows = []
    for server in servers:
        if server.name == "plain":
            continue
        found = asyncio.run(ask([server.port], pictures, 64, seconds))
        rows.append({"work": "load", "server": server.name, "clients": 64, "seconds": seconds, **found.row()})
        print(f"{server.name}, 64 clients for {seconds:g} s: {json.dumps(found.row())}")
    short = Server("short queue", [*SERVERS["vitrail"], "--queue", "16", "--max-images", "16"])
    try:
        short.wait(pictures[0])
        found = asyncio.run(ask([short.port], pictures, 64, min(seconds, 20), patient=True))
    finally:
        short.stop()
    rows.append(
        {"work": "overload", "server": "queue of 16", "clients": 64, "seconds": min(seconds, 20), **found.row()}
    )
    print(f"a queue of 16, 64 clients: {json.dumps(found.row())}")
    return rows


if __name__ == "__main__":
    main()
