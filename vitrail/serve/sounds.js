// Sounds on the page of vitrail serve. The microphone is recorded as samples and sent as WAV: what browsers record by themselves,
// Opus in WebM or AAC in MP4, is not read by the server. Files of such kinds are decoded here and sent as WAV too.
"use strict";
const READABLE = /\.(wav|wave|flac|ogg|oga|opus|mp3|aif|aiff|aifc)$/i;
const SOUND_TYPES = "audio/*,.wav,.flac,.ogg,.opus,.mp3,.aiff,.m4a,.webm";
const MOST_SECONDS = 30; // of a recording
const QUIET = 0.06, MARGIN = 0.1; // of the loudest tenth of a second, and seconds kept before and after

// Samples between -1 and 1 as a WAV file of one channel and 16 bits.
function encodeWav(samples, rate) {
  const data = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => { for (let k = 0; k < letters.length; k++) data.setUint8(at + k, letters.charCodeAt(k)); };
  text(0, "RIFF"); data.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt ");
  data.setUint32(16, 16, true); data.setUint16(20, 1, true); data.setUint16(22, 1, true);
  data.setUint32(24, rate, true); data.setUint32(28, 2 * rate, true); data.setUint16(32, 2, true); data.setUint16(34, 16, true);
  text(36, "data"); data.setUint32(40, 2 * samples.length, true);
  for (let k = 0; k < samples.length; k++) data.setInt16(44 + 2 * k, Math.round(32767 * Math.max(-1, Math.min(1, samples[k]))), true);
  return new Blob([data.buffer], { type: "audio/wav" });
}

// The samples without the silence before and after them: a model takes a part of a long recording.
function trimSilence(samples, rate) {
  const step = Math.max(1, Math.round(rate / 50)), loudness = [];
  for (let at = 0; at < samples.length; at += step) loudness.push(Math.sqrt(samples.subarray(at, at + step).reduce((sum, v) => sum + v * v, 0) / step));
  const loud = (value) => value > QUIET * Math.max(...loudness), first = loudness.findIndex(loud), last = loudness.findLastIndex(loud);
  if (first < 0) return samples;
  return samples.subarray(Math.max(0, first * step - Math.round(MARGIN * rate)), Math.min(samples.length, (last + 1) * step + Math.round(MARGIN * rate)));
}

// A file as the server reads it: as it is, or decoded by the browser and as WAV at the model's rate.
async function readableSound(file, rate) {
  if (READABLE.test(file.name) || /^audio\/(wav|x-wav|wave|flac|x-flac|mpeg|ogg|aiff|x-aiff)/.test(file.type)) return file;
  const context = new OfflineAudioContext(1, 1, Math.max(8000, Math.min(96000, rate)));
  let decoded;
  try { decoded = await context.decodeAudioData(await file.arrayBuffer()); } catch { return file; /* the server says what is wrong */ }
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, k) => decoded.getChannelData(k));
  const mono = channels[0].map((_, k) => channels.reduce((sum, channel) => sum + channel[k], 0) / channels.length);
  return new File([encodeWav(mono, decoded.sampleRate)], `${file.name.replace(/\.\w+$/, "")}.wav`, { type: "audio/wav", lastModified: file.lastModified });
}

// Record the microphone until `finish` is called. `tell` receives the seconds so far and the loudness of the last block.
async function startRecording(tell) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: false, autoGainControl: true } });
  const context = new AudioContext(), blocks = [];
  const stop = () => { for (const track of stream.getTracks()) track.stop(); context.close().catch(() => {}); };
  try {
    await context.audioWorklet.addModule("recorder.js");
    const source = context.createMediaStreamSource(stream), recorder = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    recorder.port.onmessage = ({ data }) => {
      if (blocks.length * data.length >= MOST_SECONDS * context.sampleRate) return;
      blocks.push(data);
      tell((blocks.length * data.length) / context.sampleRate, Math.sqrt(data.reduce((sum, v) => sum + v * v, 0) / data.length));
    };
    source.connect(recorder);
  } catch (error) {
    stop();
    throw error;
  }
  const finish = () => {
    stop();
    const samples = new Float32Array(blocks.reduce((sum, block) => sum + block.length, 0));
    blocks.reduce((at, block) => { samples.set(block, at); return at + block.length; }, 0);
    const kept = trimSilence(samples, context.sampleRate);
    return samples.length ? new File([encodeWav(kept, context.sampleRate)], `recording, ${(kept.length / context.sampleRate).toFixed(1)} s.wav`, { type: "audio/wav" }) : null;
  };
  return { finish, stop };
}
