// Included before each file of mlx-c.
//
// mlx-c hands the text of an exception to its error function as a printf format. A tensor or file
// name with a `%` in it would be read as a conversion: pass the text as data instead.

#pragma once

#include "mlx/c/error.h"

#ifndef __FILE_NAME__
#define __FILE_NAME__ "mlx-c"
#endif

#undef mlx_error
#define mlx_error(message) _mlx_error(__FILE_NAME__, __LINE__, "%s", message)
