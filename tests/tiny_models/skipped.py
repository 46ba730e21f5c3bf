"""The model types that are not made, by the reason."""

from __future__ import annotations

__all__ = ["SKIPPED"]

_BY_REASON: dict[str, tuple[str, ...]] = {
    "the rules make no configuration and inputs for it": (
        "align", "apertus1p5", "audio-spectrogram-transformer", "bit", "blip-2",
        "bridgetower", "canary", "chameleon", "clap", "cohere_asr", "cohere_compass", "csm",
        "d_fine", "dbrx", "deepseek_ocr2", "deimv2", "depth_anything", "depth_pro", "dia",
        "diffusion_gemma", "donut-swin", "dots3_note", "efficientloftr", "efficientnet",
        "emu3", "ernie4_5_vl_moe", "fun_asr_nano", "gemma4_assistant",
        "gemma4_unified_assistant", "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr",
        "glmga", "granite4_vision", "granite_speech5_ctc", "grounding-dino", "hgnet_v2",
        "hunyuan_vl", "idefics", "instructblip", "instructblipvideo", "kosmos-2",
        "kyutai_speech_to_text", "lasr_ctc", "layoutlmv2", "layoutlmv3", "led", "lightglue",
        "llama4", "lw_detr", "lxmert", "mask2former", "mimo_v2_flash", "mm-grounding-dino",
        "molmo2", "moonshine", "moonshine_streaming", "muse_spark", "nemo_speechlm",
        "nemotron3_5_asr", "nemotron3_diarization", "nemotron_asr_streaming",
        "nemotron_h_omni", "neomme", "omniasr_ctc", "oneformer", "paddleocr_vl",
        "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt", "pi0", "pix2struct", "pop2piano",
        "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "pp_lcnet_v4",
        "pp_ocrv5_server_det", "pp_ocrv5_server_rec", "pp_ocrv6_medium_det",
        "pp_ocrv6_small_det", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec",
        "prompt_depth_anything", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl",
        "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen4_exp", "qwen4_exp_text",
        "rf_detr", "rt_detr", "rt_detr_v2", "sam", "sam3_tracker", "sam3_video", "sam_hq",
        "siglip2", "slanet", "slanext", "speech-encoder-decoder", "speech_to_text",
        "step3p7", "superglue", "superpoint", "swin", "textnet", "timesformer", "udop",
        "upernet", "videomae", "videomt", "videoprism", "videoprism_vision_model",
        "vision-encoder-decoder", "vitmatte", "vitpose", "vivit", "vjepa2", "voxtral",
        "voxtral_realtime", "wav2vec2-bert", "whisper", "xclip", "xlstm", "zamba",
        "zoedepth",
    ),
    "no task lists it as a text, image or sound model": (
        "EvollaModel", "autoformer", "bros", "clvp", "colqwen2", "decision_transformer",
        "dpr", "embedding_gemma2", "esmfold2", "flava", "glm_image",
        "higgs_audio_v2_tokenizer", "informer", "jev", "layoutxlm", "mgp-str",
        "mimi_decoder", "mimi_encoder", "muse_glimmer_assistant", "neucodec", "nougat",
        "openai_privacy_filter", "patchtsmixer", "patchtst", "pe_audio", "pe_audio_video",
        "pe_video", "pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_decoder",
        "pocket_tts_audio_tokenizer_encoder", "qwen3_omni_moe_talker_code_predictor",
        "qwen3_omni_moe_talker_text", "rag", "sam3_lite_text", "seggpt", "speecht5_hifigan",
        "splinter", "time_series_transformer", "timesfm", "timesfm2_5", "tvp", "univnet",
        "uvdoc", "vibevoice_acoustic_tokenizer_decoder", "vision-text-dual-encoder",
        "visual_bert", "wavtokenizer", "xcodec", "xcodec2",
    ),
    "the rules leave it above 4 million weights": (
        "bark", "blt", "chmv2", "dinov3_convnext", "dots3_note_text", "edgetam_video",
        "fastspeech2_conformer_with_hifigan", "janus", "musicgen", "musicgen_melody",
        "perceiver", "pp_formulanet", "pp_lcnet_v3", "pp_ocrv5_mobile_det",
        "pp_ocrv5_mobile_rec", "qwen2_5_omni", "sam2", "sam2_video", "tipsv2_dpt",
        "uvdoc_backbone", "vibevoice", "vibevoice_asr", "vits",
    ),
    "needs timm": (
        "conditional_detr", "dab-detr", "deformable_detr", "detr", "edgetam", "fast_vlm",
        "gemma3n", "omdet-turbo", "perception_lm", "table-transformer", "timm_backbone",
        "timm_wrapper",
    ),
    "needs natten": (
        "dinat",
    ),
}  # fmt: skip
SKIPPED: dict[str, str] = {name: why for why, names in _BY_REASON.items() for name in names}
