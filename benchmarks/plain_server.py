"""Baseline server of benchmarks/serving.py: FastAPI, timm's model and transforms, one lock around the model.

python benchmarks/plain_server.py PORT WEIGHTS
"""

import io
import sys
import threading
from typing import Any

import measure  # noqa: F401 (so that torchvision imports beside a CPU build of PyTorch)
import timm
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image


def application(weights: str) -> FastAPI:
    """Return the application; POST /predict takes the bytes of an image."""
    app, lock = FastAPI(), threading.Lock()
    model = timm.create_model("deit_tiny_patch16_224", checkpoint_path=weights).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)

    def predicted(data: bytes) -> dict[str, Any]:
        pixels = transform(Image.open(io.BytesIO(data)).convert("RGB"))[None]
        with lock, torch.inference_mode():
            odds = model(pixels).softmax(-1)[0]
        score, index = odds.topk(5)
        pairs = zip(index.tolist(), score.tolist(), strict=True)
        return {"answers": [{"label": label, "score": value} for label, value in pairs]}

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        return await run_in_threadpool(predicted, await request.body())

    return app


if __name__ == "__main__":
    uvicorn.run(application(sys.argv[2]), port=int(sys.argv[1]), log_level="warning")
