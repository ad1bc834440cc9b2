"""What Gemma 4's feature extractors make of sounds: mlex-audio/tests/data.

    pip install -r tools/requirements-vlm.txt
    python tools/make_audio_golden.py [FFMPEG]

Writes the sound files, `cases.json` and `expected.safetensors`. The sounds are sums of tones, so that they
are known at any sampling rate: of a file of 44.1 kHz the expected samples are the tones at 16 kHz, and the
expected features those of these samples. Tensors:

  NAME.samples    the tones at 16 kHz
  NAME.mel        [frames, 128] of mlx-vlm's extractor, which transformers' must confirm
`lengths` has frames, valid frames and tokens for sounds of so many samples, from transformers; `raw` the
tokens of the unified variants. With the program FFMPEG the files of other formats are encoded anew; without
it they stay as they are.
"""

import subprocess
import sys
import types
import wave

import numpy as np
from mlx_vlm.models.gemma4.audio_feature_extractor import Gemma4AudioFeatureExtractor as Ported
from mlx_vlm.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor as Original
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from goldens import ROOT, save_json, save_tensors

DATA = ROOT / "mlex-audio/tests/data"
TONES = [(220.0, 0.3), (997.0, 0.2), (2500.0, 0.1)]
SETTINGS = {
    "preemphasis": 0.97,
    "fft_overdrive": True,
    "input_scale_factor": 2.0,
    "per_bin_mean": [0.01 * n for n in range(128)],
    "per_bin_stddev": [1.0 + 0.01 * n for n in range(128)],
}


def tones(rate, seconds):
    time = np.arange(int(rate * seconds)) / rate
    swell = np.sin(np.pi * time / seconds) ** 2
    return swell * sum(volume * np.sin(2 * np.pi * hertz * time) for hertz, volume in TONES)


def save_wav(name, rate, channels, width=2):
    """PCM of 8 * width bits; `channels` is a list of samples of -1 to 1."""
    samples = np.stack(channels, axis=-1)
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
    data = whole.view(np.uint8).reshape(*whole.shape, 4)[..., :width]
    with wave.open(str(DATA / name), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())
    return (whole / 2.0 ** (8 * width - 1)).astype(np.float32)


def features(samples, settings):
    ours = Ported(**settings)(samples)
    other = Original(**settings)([samples])
    mel, mask = np.asarray(ours["input_features"][0]), np.asarray(ours["input_features_mask"][0])
    assert np.abs(mel - np.asarray(other["input_features"][0])).max() < 2e-3
    assert np.array_equal(mask, np.asarray(other["input_features_mask"][0]))
    return mel, mask


def tokens(mask):
    """What transformers' processor puts in the place of a sound."""
    names = types.SimpleNamespace(boa_token="", eoa_token="", audio_token="x")
    return len(Gemma4Processor.replace_audio_token(names, {"input_features_mask": [mask]}, 0))


def main():
    DATA.mkdir(parents=True, exist_ok=True)
    tensors, rows = {}, []

    def case(name, file, samples, settings=None, exact=False):
        settings = settings or {}
        mel, mask = features(samples.astype(np.float32), settings)
        tensors[f"{name}.samples"], tensors[f"{name}.mel"] = samples.astype(np.float32), mel
        row = {"name": name, "file": file, "settings": settings, "exact": exact}
        rows.append({**row, "valid": int(mask.sum()), "tokens": tokens(mask)})

    plain = save_wav("plain.wav", 16000, [tones(16000, 0.4)])[:, 0]
    case("plain", "plain.wav", plain, exact=True)
    case("settings", "plain.wav", plain, SETTINGS, exact=True)
    case("flavour", "plain.wav", plain, {"preemphasis": 0.5, "preemphasis_htk_flavor": False}, exact=True)
    odd = save_wav("odd.wav", 16000, [tones(16000, 0.25)[:3333]], width=3)[:, 0]
    case("odd", "odd.wav", odd, exact=True)
    silence = save_wav("silence.wav", 16000, [np.zeros(4000)])[:, 0]
    case("silence", "silence.wav", silence, exact=True)
    # What one channel has more, the other has less; and a tone that 16 kHz cannot hold.
    stereo = tones(44100, 0.4)
    time = np.arange(len(stereo)) / 44100
    high = 0.2 * np.sin(np.pi * time / 0.4) ** 2 * np.sin(2 * np.pi * 15000 * time)
    save_wav("stereo.wav", 44100, [1.3 * stereo + high, 0.7 * stereo + high])
    case("stereo", "stereo.wav", tones(16000, 0.4))
    save_wav("low.wav", 8000, [tones(8000, 0.4)])
    case("low", "low.wav", tones(16000, 0.4))
    for file in ("coded.flac", "coded.mp3", "coded.ogg", "coded.m4a", "coded.aac"):
        if len(sys.argv) > 1:
            quality = ["-c:a", "libvorbis", "-q:a", "6"] if file.endswith("ogg") else ["-b:a", "256k"]
            command = [sys.argv[1], "-v", "error", "-y", "-i", DATA / "stereo.wav", "-bitexact", *quality, DATA / file]
            subprocess.run(command, check=True)
        rows.append({"name": "stereo", "file": file, "settings": {}, "exact": False, **{k: rows[5][k] for k in ("valid", "tokens")}})

    lengths = []
    for length in [161, 319, 320, 321, 480, 1000, 16000, 16160, 16161, 100_000, 479_999, 480_000, 500_000]:
        mel, mask = features(np.zeros(length, np.float32), {})
        lengths.append({"samples": length, "frames": len(mel), "valid": int(mask.sum()), "tokens": tokens(mask)})
    raw = []
    for length in [1, 639, 640, 641, 16000]:
        out = Gemma4UnifiedAudioFeatureExtractor()(np.ones(length, np.float32))
        raw.append({"samples": length, "tokens": int(out["input_features_mask"].sum())})
    save_tensors(DATA / "expected.safetensors", tensors)
    save_json(DATA / "cases.json", {"cases": rows, "lengths": lengths, "raw": raw}, indent=None)


if __name__ == "__main__":
    main()
