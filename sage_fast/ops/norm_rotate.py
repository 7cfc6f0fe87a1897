import torch
import torch.nn.functional as F


def norm_rotate(video, text, vw, tw, rotary, eps=1e-6):
    v = F.rms_norm(video, vw.shape, vw.to(video.dtype), eps)
    t = F.rms_norm(text, tw.shape, tw.to(video.dtype), eps)
    p = torch.view_as_complex(v.unflatten(-1, (-1, 2)).float())
    v = torch.view_as_real(p * torch.view_as_complex(rotary)[None, :, None]).flatten(-2).to(t.dtype)
    return torch.cat([v, t], 1)
