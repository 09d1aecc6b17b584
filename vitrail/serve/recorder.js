// Passes the microphone's samples on, the mean of its channels, in blocks of about a tenth of a second.
"use strict";
class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(Math.ceil(sampleRate / 10));
    this.filled = 0;
  }

  process([channels]) {
    const [first] = channels;
    for (let k = 0; k < (first?.length ?? 0); k++) {
      this.block[this.filled++] = channels.reduce((sum, channel) => sum + channel[k], 0) / channels.length;
      if (this.filled === this.block.length) {
        this.port.postMessage(this.block.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}
registerProcessor("recorder", Recorder);
