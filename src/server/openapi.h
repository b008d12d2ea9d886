/* openapi.h - the description of the API that /openapi.json serves. */
#ifndef SERVER_OPENAPI_H
#define SERVER_OPENAPI_H

#include "base/json.h"

/* An OpenAPI 3.1 document; NULL: no memory. keys: requests need one. */
json_t *srv_openapi(bool keys);

#endif
