/** An audio worklet that converts microphone input to mono 16-bit PCM at the sample rate of its context. */

const SAMPLES_PER_CHUNK = 1600; // 100 ms at 16 kHz

class Recorder extends AudioWorkletProcessor {
  #chunk = new Int16Array(SAMPLES_PER_CHUNK);
  #length = 0;

  /** @param {Float32Array[][]} inputs */
  process([channels]) {
    const [samples = []] = channels; // the context mixes all channels into one
    for (const sample of samples) {
      this.#chunk[this.#length] = Math.max(-1, Math.min(1, sample)) * 0x7fff;
      this.#length += 1;
      if (this.#length === SAMPLES_PER_CHUNK) this.#send();
    }
    return true;
  }

  #send() {
    this.port.postMessage(this.#chunk.buffer, [this.#chunk.buffer]);
    this.#chunk = new Int16Array(SAMPLES_PER_CHUNK);
    this.#length = 0;
  }
}

registerProcessor("recorder", Recorder);
